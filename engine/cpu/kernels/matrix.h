// Products of activation rows with packed weight matrices.
#pragma once

#include "tile.h"

namespace tandem {

constexpr int panel_columns = 64;

constexpr int pad_to_panel(int count) { return (count + panel_columns - 1) / panel_columns * panel_columns; }

// A weight matrix [num_outputs, num_inputs], packed as [num_panels][num_steps][64 outputs] units; the last panel is
// filled up with zeros (engine/cpu/packing.py packs it).
template <class Unit>
struct PackedMatrix {
    const Unit* panels;
    int num_panels;
    int num_steps;

    PackedMatrix(const void* packed, int num_outputs, int num_inputs)
        : panels(static_cast<const Unit*>(packed)),
          num_panels(pad_to_panel(num_outputs) / panel_columns),
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

// Hand all outputs of `num_rows` rows to `finish`. left: rows `left_stride` units apart, in cache as far as possible:
// every panel meets all rows before the next one is read. Panels are one plain stream, which the processor fetches
// ahead by itself; asking for the next panel early, or cutting panels into parts that fit the first-level cache, made
// every number of rows slower.
template <class Unit, class Finish>
void multiply(const Unit* left, long left_stride, int num_rows, const PackedMatrix<Unit>& matrix, Finish finish) {
    const long panel_units = static_cast<long>(matrix.num_steps) * panel_columns;
    for (int panel = 0; panel < matrix.num_panels; ++panel) {
        const Unit* units = matrix.panels + panel * panel_units;
        visit_parts<max_tile_rows>(num_rows, [=](auto rows, int first_row) __attribute__((always_inline)) {
            constexpr int Rows = decltype(rows)::value;
            for (int first_column = 0; first_column < panel_columns; first_column += tile_vectors * num_lanes) {
                const Unit* right[tile_vectors];
                for (int column = 0; column < tile_vectors; ++column)
                    right[column] = units + first_column + column * num_lanes;
                Tile<Rows, tile_vectors> sums = {};
                accumulate<Unit, Rows, tile_vectors>(sums, left + first_row * left_stride, left_stride, right,
                                                     panel_columns, matrix.num_steps);
                finish(sums, first_row, panel * panel_columns + first_column);
            }
        });
    }
}

}  // namespace tandem
