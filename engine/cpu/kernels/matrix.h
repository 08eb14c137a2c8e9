// Products of activation rows with packed weight matrices.
#pragma once

#include "tile.h"

namespace tandem {

constexpr int panel_vectors = 2, panel_columns = panel_vectors * num_lanes;

// Columns of all matrices and rows of all activations are filled up to whole tiles, so that no kernel has a remainder.
constexpr int tile_columns = 64;
static_assert(tile_columns % (tile_vectors * num_lanes) == 0);

constexpr int pad_columns(int count) { return (count + tile_columns - 1) / tile_columns * tile_columns; }

// A weight matrix [num_outputs, num_inputs], packed as [num_panels][num_steps][32 outputs] units and filled up with
// zeros (engine/cpu/packing.py packs it).
template <class Unit>
struct PackedMatrix {
    const Unit* panels;
    int num_panels;
    int num_steps;

    PackedMatrix(const void* packed, int num_outputs, int num_inputs)
        : panels(static_cast<const Unit*>(packed)),
          num_panels(pad_columns(num_outputs) / panel_columns),
          num_steps((num_inputs + values_per_unit<Unit> - 1) / values_per_unit<Unit>) {}
};

// What becomes of a finished tile: `sums` are outputs [first_column, + 16 * Columns) of rows from `first_row` on.
struct StoreSums {
    float* output;
    long stride;  // floats between rows

    template <int Rows, int Columns>
    TANDEM_INLINE void operator()(Tile<Rows, Columns>& sums, int first_row, int first_column) const {
        for (int row = 0; row < Rows; ++row)
            for (int column = 0; column < Columns; ++column)
                store(output + (first_row + row) * stride + first_column + column * num_lanes, sums[row][column]);
    }
};

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

// silu(gate) * up, where the matrix holds sixteen gate outputs before sixteen up outputs, and so on.
// Source: SwiGLU, arXiv:2002.05202.
template <class Unit>
struct StoreSwiglu {
    Unit* output;
    long stride;  // units between rows

    template <int Rows, int Columns>
    TANDEM_INLINE void operator()(Tile<Rows, Columns>& sums, int first_row, int first_column) const {
        static_assert(Columns % 2 == 0, "a tile must hold whole pairs of gate and up");
        for (int row = 0; row < Rows; ++row)
            for (int column = 0; column < Columns; column += 2) {
                const Lanes gate = sums[row][column];
                const Lanes gated = gate / (1.0f + exponential(minimum(-gate, broadcast(88.0f)))) * sums[row][column + 1];
                const int first_value = (first_column + column * num_lanes) / 2;
                store_values(output + (first_row + row) * stride + first_value / values_per_unit<Unit>, gated);
            }
    }
};

// One tile of outputs: `panels` begins with the first of the panels that its columns take.
template <class Unit, int Rows, int Columns, class Finish>
TANDEM_INLINE void multiply_tile(const Unit* left, long left_stride, const Unit* panels, int num_steps, int first_row,
                                 int first_column, Finish finish) {
    const long panel_units = static_cast<long>(num_steps) * panel_columns;
    const Unit* right[Columns];
    for (int column = 0; column < Columns; ++column)
        right[column] = panels + column / panel_vectors * panel_units + column % panel_vectors * num_lanes;
    Tile<Rows, Columns> sums = {};
    accumulate<Unit, Rows, Columns>(sums, left + first_row * left_stride, left_stride, right, panel_columns, num_steps);
    finish(sums, first_row, first_column);
}

// Hand all outputs of `num_rows` rows to `finish`. left: rows `left_stride` units apart, in cache as far as possible.
//
// Weights come from memory as one plain stream, which the processor fetches ahead by itself. A few rows share one high
// tile, whose products hide the wait; more rows share wide tiles, which ask less of the cache that the panels are in.
template <class Unit, class Finish>
void multiply(const Unit* left, long left_stride, int num_rows, const PackedMatrix<Unit>& matrix, Finish finish) {
    const long panel_units = static_cast<long>(matrix.num_steps) * panel_columns;
    if (num_rows <= max_high_tile_rows) {
        with_constant<1, max_high_tile_rows>(num_rows, [=](auto rows) {
            for (int panel = 0; panel < matrix.num_panels; ++panel)
                multiply_tile<Unit, decltype(rows)::value, panel_vectors>(
                    left, left_stride, matrix.panels + panel * panel_units, matrix.num_steps, 0,
                    panel * panel_columns, finish);
        });
        return;
    }
    for (int panel = 0; panel < matrix.num_panels; panel += tile_vectors / panel_vectors)
        visit_parts<max_tile_rows>(num_rows, [=](auto rows, int first_row) TANDEM_INLINE_LAMBDA {
            multiply_tile<Unit, decltype(rows)::value, tile_vectors>(
                left, left_stride, matrix.panels + panel * panel_units, matrix.num_steps, first_row,
                panel * panel_columns, finish);
        });
}

}  // namespace tandem
