// Products of activation rows with packed weight matrices.
#pragma once

#include <algorithm>

#include "quantised.h"
#include "tile.h"

namespace tandem {

// Columns of all matrices and rows of all activations are filled up to whole tiles, so that no kernel has a remainder.
constexpr int tile_columns = 64;
static_assert(tile_columns % (tile_vectors * num_lanes) == 0);

constexpr int pad_columns(int count) { return (count + tile_columns - 1) / tile_columns * tile_columns; }

// A weight matrix [num_outputs, num_inputs] in panels of 32 outputs, filled up with zeros (engine/cpu/packing.py packs
// it): [num_panels][num_steps][32 outputs] units.
template <class Unit>
struct FloatPanels {
    const Unit* units;
    int num_panels, num_steps;

    FloatPanels(const TandemMatrix& matrix, int num_outputs, int num_inputs)
        : units(static_cast<const Unit*>(matrix.data)),
          num_panels(pad_columns(num_outputs) / panel_columns),
          num_steps((num_inputs + values_per_unit<Unit> - 1) / values_per_unit<Unit>) {}

    // [count][32 outputs] units from step `first_step` on, where the steps of a panel follow those of the one before.
    TANDEM_INLINE const Unit* steps(long first_step, long /* count */) const {
        return units + first_step * panel_columns;
    }
};

// The same from blocks (quantised.h).
template <class Unit>
struct BlockPanels {
    TandemMatrix stored;
    int num_panels, num_steps;
    Unit* scratch;  // room for a wide tile's panels

    BlockPanels(const TandemMatrix& matrix, int num_outputs, int num_inputs, Unit* unpacked)
        : stored(matrix),
          num_panels(pad_columns(num_outputs) / panel_columns),
          num_steps(num_inputs / values_per_unit<Unit>),
          scratch(unpacked) {}

    TANDEM_INLINE const char* block(long first_step) const {
        return static_cast<const char*>(stored.data) +
               first_step / block_steps<Unit> * packed_block_bytes(stored.storage);
    }

    // The same, good until the next call.
    TANDEM_INLINE const Unit* steps(long first_step, long count) const {
        unpack_blocks<Unit>(stored.storage, block(first_step), count / block_steps<Unit>, scratch);
        return scratch;
    }

    // The weights of one output.
    void read_output(int output, float* weights) const {
        const Unit* panel = steps(static_cast<long>(output / panel_columns) * num_steps, num_steps);
        for (int step = 0; step < num_steps; ++step) {
            const Unit unit = panel[step * panel_columns + output % panel_columns];
            for (int index = 0; index < values_per_unit<Unit>; ++index)
                weights[step * values_per_unit<Unit> + index] = value_of(unit, index);
        }
    }
};

// A packed matrix as it is stored, of a model whose units are `Unit`.
template <class Unit>
struct PackedMatrix {
    TandemMatrix stored;
    int num_outputs, num_inputs;
    Factor<Unit>* scratch;  // room for 64 outputs, where blocks are unpacked

    FloatPanels<Unit> floats() const { return {stored, num_outputs, num_inputs}; }
    BlockPanels<Factor<Unit>> blocks() const { return {stored, num_outputs, num_inputs, scratch}; }
};

// What becomes of a finished tile: `sums` are outputs [first_column, + 16 * Columns) of rows from `first_row` on.

// The left side of the next product.
template <class Unit>
struct StoreFactors {
    Factor<Unit>* output;
    long stride;  // factors between rows

    template <int Rows, int Columns>
    TANDEM_INLINE void operator()(Tile<Rows, Columns>& sums, int first_row, int first_column) const {
        for (int row = 0; row < Rows; ++row)
            for (int column = 0; column < Columns; ++column)
                store_factors<Unit>(
                    output + (first_row + row) * stride + (first_column + column * num_lanes) / values_per_factor<Unit>,
                    sums[row][column]);
    }
};

using StoreSums = StoreFactors<float>;

struct AddSums {
    float* output;
    long stride;  // floats between rows

    template <int Rows, int Columns>
    TANDEM_INLINE void operator()(Tile<Rows, Columns>& sums, int first_row, int first_column) const {
        for (int row = 0; row < Rows; ++row)
            for (int column = 0; column < Columns; ++column) {
                float* place = output + (first_row + row) * stride + first_column + column * num_lanes;
                store(place, load(place) + sums[row][column]);
            }
    }
};

// silu(gate) * up. Source: SwiGLU, arXiv:2002.05202.
TANDEM_INLINE Lanes swiglu(Lanes gate, Lanes up) {
    return gate / (1.0f + exponential(minimum(-gate, broadcast(88.0f)))) * up;
}

// `swiglu` where the matrix holds sixteen gate outputs before sixteen up outputs, and so on.
template <class Unit>
struct StoreSwiglu {
    Factor<Unit>* output;
    long stride;  // factors between rows

    template <int Rows, int Columns>
    TANDEM_INLINE void operator()(Tile<Rows, Columns>& sums, int first_row, int first_column) const {
        static_assert(Columns % 2 == 0, "a tile must hold whole pairs of gate and up");
        for (int row = 0; row < Rows; ++row)
            for (int column = 0; column < Columns; column += 2) {
                const int first_value = (first_column + column * num_lanes) / 2;
                store_factors<Unit>(output + (first_row + row) * stride + first_value / values_per_factor<Unit>,
                                    swiglu(sums[row][column], sums[row][column + 1]));
            }
    }
};

// Where each of a tile's columns begins, from panel `panel` on.
template <template <class> class Panels, class Unit, int Columns>
TANDEM_INLINE void find_columns(const Panels<Unit>& panels, int panel, const Unit* (&columns)[Columns]) {
    const long num_steps = panels.num_steps;
    const Unit* units = panels.steps(panel * num_steps, Columns / panel_vectors * num_steps);
    for (int column = 0; column < Columns; ++column)
        columns[column] =
            units + column / panel_vectors * num_steps * panel_columns + column % panel_vectors * num_lanes;
}

struct FetchNothing {
    TANDEM_INLINE void operator()(int, int) const {}
};

constexpr int bytes_ahead = 8192;

// Asks for what lies so far past a panel's step.
template <class Unit>
struct FetchAhead {
    static_assert(panel_columns * sizeof(Unit) == 2 * line_bytes, "prefetch_ahead asks for what one step takes");
    const Unit* panel;

    TANDEM_INLINE void operator()(int step, int column) const {
        if (column == 0) prefetch_ahead<bytes_ahead>(panel + step * panel_columns);
    }
};

// Asks for the next panel while this one is passed over again and again, for each column of `NumTiles` tiles: each pass
// asks for its share, so that none waits for memory while others only compute.
template <class Unit, int NumTiles>
struct FetchNext {
    static constexpr int step_units = num_lanes / NumTiles;
    const Unit* first;
    long column_units;

    FetchNext(const Unit* panel, int num_steps, int tile)
        : first(panel + static_cast<long>(num_steps) * panel_columns * (NumTiles + tile) / NumTiles),
          column_units(static_cast<long>(num_steps) * step_units) {}

    TANDEM_INLINE void operator()(int step, int column) const {
        prefetch(first + column * column_units + step * step_units);
    }
};

// What fetches weights in one of the `NumTiles` tiles that do. With AVX-512, from 7 rows on, a step of a panel computes
// for longer than the processor looks ahead in a stream: weights come in 0.9 of the time, with fewer rows in up to 1.3
// times (bench/results/2026-11-30-engine.md). Without: 0.77 to 0.9 (2026-11-30-engine-avx2.md).
template <int Rows, int NumTiles, class Unit>
TANDEM_INLINE auto fetch_for(const Unit* panel, int num_steps, int tile) {
    if constexpr (NumTiles > 1 || !holds_columns(Rows, panel_vectors))
        return FetchNext<Unit, NumTiles>(panel, num_steps, tile);
    else if constexpr (TANDEM_AVX512 && Rows >= 7)
        return FetchAhead<Unit>{panel};
    else
        return FetchNothing{};
}

// `accumulate` of a panel's steps, apart.
template <class Unit, int Rows, int Columns, class Fetch>
TANDEM_INLINE void accumulate_steps(Tile<Rows, Columns>& sums, const Factor<Unit>* left, long left_stride,
                                    const Unit* const (&right)[Columns], int num_steps, Fetch fetch) {
    if constexpr (holds_columns(Rows, Columns))
        accumulate_apart<Unit, Rows>(&sums[0][0], Columns, left, left_stride, right, panel_columns, num_steps, fetch);
    else
        accumulate(sums, left, left_stride, right, panel_columns, num_steps, fetch);
}

// So many rows, at most, are multiplied by blocks that are unpacked on the way: in 0.84 to 0.98 of the time that it
// takes by way of memory. 10 and 12 rows leave too few registers: 1.07 and 1.14 (bench/results/2026-11-30-engine.md).
// Without AVX-512: 0.88 with 2 rows, 1.2 with 4 (2026-11-30-engine-avx2.md).
constexpr int max_block_rows = TANDEM_AVX512 ? 8 : 2;

// Panels that one or two rows read side by side, a few steps of each in turn: with AVX2 four streams come faster than
// one, 0.85 to 0.88 of the time, and than one that is asked for ahead (2026-11-30-engine-avx2.md).
template <int Rows>
constexpr int num_streams = !TANDEM_AVX512 && holds_columns(Rows, panel_vectors) ? 4 : 1;
constexpr int stream_steps = 4;

// sums[panel] += products with each of `num_panels` panels that lie one after another.
template <class Unit, int Rows>
__attribute__((noinline)) void accumulate_streams(Tile<Rows, panel_vectors>* sums, const Factor<Unit>* left,
                                                  long left_stride, const Unit* first, int num_panels, int num_steps) {
    const long panel_units = static_cast<long>(num_steps) * panel_columns;
    for (int step = 0; step < num_steps; step += stream_steps)
        for (int panel = 0; panel < num_panels; ++panel) {
            const Unit* begin = first + panel * panel_units + step * panel_columns;
            const Unit* const right[] = {begin, begin + num_lanes};
            Tile<Rows, panel_vectors> tile;
            copy_tile(sums[panel], tile);
            accumulate_columns(tile, left + step * factors_per_unit<Unit>, left_stride, right, panel_columns,
                               std::min(stream_steps, num_steps - step), FetchNothing{});
            copy_tile(tile, sums[panel]);
        }
}

// All outputs of a few rows, which share one high tile: a panel's products hide the wait for the next.
template <int Rows, class Unit, class Finish>
void multiply_few(const Factor<Unit>* left, long left_stride, const FloatPanels<Unit>& panels, Finish finish) {
    constexpr int Streams = num_streams<Rows>;
    for (int panel = 0; panel < panels.num_panels; panel += Streams) {
        const int count = std::min(Streams, panels.num_panels - panel);
        const Unit* right[panel_vectors];
        find_columns(panels, panel, right);
        Tile<Rows, panel_vectors> sums[Streams] = {};
        if constexpr (Streams > 1)
            accumulate_streams<Unit, Rows>(sums, left, left_stride, right[0], count, panels.num_steps);
        else
            accumulate_steps(sums[0], left, left_stride, right, panels.num_steps,
                             fetch_for<Rows, 1>(right[0], panels.num_steps, 0));
        for (int index = 0; index < count; ++index) finish(sums[index], 0, (panel + index) * panel_columns);
    }
}

// The same: blocks are unpacked on the way or, of more rows, one at a time into the first-level cache.
template <int Rows, class Unit, class Finish>
void multiply_few(const Unit* left, long left_stride, const BlockPanels<Unit>& panels, Finish finish) {
    for (int panel = 0; panel < panels.num_panels; ++panel) {
        const long first_step = static_cast<long>(panel) * panels.num_steps;
        Tile<Rows, panel_vectors> sums = {};
        if constexpr (Rows <= max_block_rows) {
            accumulate_blocks(sums, left, left_stride, panels.stored.storage, panels.block(first_step),
                              panels.num_steps / block_steps<Unit>);
        } else {
            for (int step = 0; step < panels.num_steps; step += block_steps<Unit>) {
                const Unit* block = panels.steps(first_step + step, block_steps<Unit>);
                const Unit* const right[] = {block, block + num_lanes};
                accumulate(sums, left + step, left_stride, right, panel_columns, block_steps<Unit>, FetchNothing{});
            }
        }
        finish(sums, 0, panel * panel_columns);
    }
}

// All outputs of more rows, in tiles of which the first `FetchingTiles` fetch what is next.
template <int MostRows, int Columns, int FetchingTiles, template <class> class Panels, class Unit, class Finish>
void multiply_tiles(const Factor<Unit>* left, long left_stride, int num_rows, const Panels<Unit>& panels,
                    Finish finish) {
    for (int panel = 0; panel < panels.num_panels; panel += Columns / panel_vectors) {
        const Unit* right[Columns];
        find_columns(panels, panel, right);
        visit_parts<MostRows>(num_rows, [&](auto rows, int first_row) TANDEM_INLINE_LAMBDA {
            constexpr int Rows = decltype(rows)::value;
            const Factor<Unit>* part = left + first_row * left_stride;
            Tile<Rows, Columns> sums = {};
            if (first_row > (FetchingTiles - 1) * MostRows)
                accumulate_steps(sums, part, left_stride, right, panels.num_steps, FetchNothing{});
            else if constexpr (FetchingTiles > 0)
                accumulate_steps(sums, part, left_stride, right, panels.num_steps,
                                 fetch_for<Rows, FetchingTiles>(right[0], panels.num_steps, first_row > 0));
            finish(sums, first_row, panel * panel_columns);
        });
    }
}

// Up to so many rows share high tiles, where weights are floats. With AVX-512: 0.91 of the time of wide tiles with 16
// rows, 0.97 with 32, where the first tile's products hide the wait for what is next
// (bench/results/2026-11-30-engine.md). Without, high tiles are as wide, but two of them fetch: 0.87 and 0.95
// (2026-11-30-engine-avx2.md).
constexpr int max_several_rows = TANDEM_AVX512 ? 36 : 48, num_fetching_tiles = TANDEM_AVX512 ? 1 : 2;

template <template <class> class Panels, class Unit, class Finish>
void multiply_panels(const Factor<Unit>* left, long left_stride, int num_rows, const Panels<Unit>& panels,
                     Finish finish) {
    if (num_rows <= max_high_tile_rows)
        return with_constant<1, max_high_tile_rows>(
            num_rows, [=](auto rows) { multiply_few<decltype(rows)::value>(left, left_stride, panels, finish); });
    if constexpr (std::is_same_v<Panels<Unit>, FloatPanels<Unit>>)
        if (num_rows <= max_several_rows)
            return multiply_tiles<max_high_tile_rows, panel_vectors, num_fetching_tiles>(left, left_stride, num_rows,
                                                                                         panels, finish);
    multiply_tiles<max_tile_rows, tile_vectors, 0>(left, left_stride, num_rows, panels, finish);
}

// Hand all outputs of `num_rows` rows to `finish`. left: rows `left_stride` factors apart, in cache as far as possible.
template <class Unit, class Finish>
void multiply(const Factor<Unit>* left, long left_stride, int num_rows, const PackedMatrix<Unit>& matrix,
              Finish finish) {
    if (matrix.stored.storage == tandem_floats)
        multiply_panels(left, left_stride, num_rows, matrix.floats(), finish);
    else
        multiply_panels(left, left_stride, num_rows, matrix.blocks(), finish);
}

}  // namespace tandem
