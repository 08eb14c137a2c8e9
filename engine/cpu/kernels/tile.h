// The one inner loop of all products: weights, attention scores and weighted values.
//
// Invariant: each output is one sum over the steps in ascending order, in one accumulator. How many rows and columns
// share a tile changes which outputs are computed together, never the order of a sum: so a token's results are the
// same to the bit in every batch and chunk.
#pragma once

#include <type_traits>

#include "simd.h"

namespace tandem {

// As many accumulators as the registers hold beside one factor and a row of columns: wide tiles of few rows, or high
// ones of two columns. Registers of eight lanes hold two rows of a tile or five of one column: its columns come in
// turn.
#if TANDEM_AVX512
constexpr int max_tile_rows = 6, tile_vectors = 4, max_high_tile_rows = 12;
constexpr bool holds_columns(int, int) { return true; }
#else
constexpr int max_tile_rows = 5, tile_vectors = 2, max_high_tile_rows = 5;
constexpr bool holds_columns(int num_rows, int num_columns) { return num_columns == 1 || num_rows <= 2; }
#endif

// A panel is what a high tile takes of a weight matrix.
constexpr int panel_vectors = 2, panel_columns = panel_vectors * num_lanes;

template <int Rows, int Columns>
using Tile = Lanes[Rows][Columns];

// Into registers, or out of them.
template <int Rows, int Columns>
TANDEM_INLINE void copy_tile(const Tile<Rows, Columns>& from, Tile<Rows, Columns>& to) {
#pragma GCC unroll 12
    for (int row = 0; row < Rows; ++row)
#pragma GCC unroll 4
        for (int column = 0; column < Columns; ++column) to[row][column] = from[row][column];
}

// Compilers that load all rows' factors first have no registers left for sums.
TANDEM_INLINE void keep_loads_here() { asm volatile("" ::: "memory"); }

// One step of `accumulate`, whose columns' units are loaded.
template <class Unit, int Rows, int Columns, class Units>
TANDEM_INLINE void multiply_step(Tile<Rows, Columns>& tile, const Factor<Unit>* left, long left_stride, int step,
                                 const Units (&columns)[Columns]) {
#pragma GCC unroll 2
    for (int index = 0; index < factors_per_unit<Unit>; ++index)
#pragma GCC unroll 12
        for (int row = 0; row < Rows; ++row) {
            if constexpr (!TANDEM_AVX512 && Columns == 1) keep_loads_here();
            const auto factor = broadcast(left[row * left_stride + step * factors_per_unit<Unit> + index]);
#pragma GCC unroll 4
            for (int column = 0; column < Columns; ++column)
                tile[row][column] = multiply_add(factor, column_values(columns[column], index), tile[row][column]);
        }
}

// `accumulate`, all columns at a time.
template <class Unit, int Rows, int Columns, class Fetch>
TANDEM_INLINE void accumulate_columns(Tile<Rows, Columns>& tile, const Factor<Unit>* left, long left_stride,
                                      const Unit* const (&right)[Columns], long right_stride, int num_steps,
                                      Fetch&& fetch) {
    for (int step = 0; step < num_steps; ++step) {
        decltype(load(right[0])) columns[Columns];
#pragma GCC unroll 4
        for (int column = 0; column < Columns; ++column) {
            fetch(step, column);
            columns[column] = load(right[column] + step * right_stride);
        }
        multiply_step<Unit>(tile, left, left_stride, step, columns);
    }
}

// The same for sums in memory, whose rows are `stride` apart. A function by itself, in which GCC finds registers for
// all of them: among other loops, or beside what becomes of a tile, it keeps some in memory.
template <class Unit, int Rows, int Columns, class Fetch>
__attribute__((noinline)) void accumulate_apart(Lanes* sums, int stride, const Factor<Unit>* left, long left_stride,
                                                const Unit* const (&right)[Columns], long right_stride, int num_steps,
                                                Fetch fetch) {
    Tile<Rows, Columns> tile;
    const Unit* begins[Columns];  // in registers, too: `keep_loads_here` would have `right` read again and again
#pragma GCC unroll 4
    for (int column = 0; column < Columns; ++column) begins[column] = right[column];
#pragma GCC unroll 12
    for (int row = 0; row < Rows; ++row)
#pragma GCC unroll 4
        for (int column = 0; column < Columns; ++column) tile[row][column] = sums[row * stride + column];
    accumulate_columns(tile, left, left_stride, begins, right_stride, num_steps, fetch);
#pragma GCC unroll 12
    for (int row = 0; row < Rows; ++row)
#pragma GCC unroll 4
        for (int column = 0; column < Columns; ++column) sums[row * stride + column] = tile[row][column];
}

// tile[row][column] += sum over steps of left[row][step] * right[column][step].
//   left: rows `left_stride` factors apart.   right[column]: sixteen units per step, steps `right_stride` units apart.
//   fetch(step, column): asks, before a step of a column, for memory that is needed later.
template <class Unit, int Rows, int Columns, class Fetch>
TANDEM_INLINE void accumulate(Tile<Rows, Columns>& tile, const Factor<Unit>* left, long left_stride,
                              const Unit* const (&right)[Columns], long right_stride, int num_steps, Fetch&& fetch) {
    if constexpr (holds_columns(Rows, Columns)) {
        accumulate_columns(tile, left, left_stride, right, right_stride, num_steps, fetch);
    } else {
#pragma GCC unroll 4
        for (int column = 0; column < Columns; ++column) {
            const Unit* const one[] = {right[column]};
            accumulate_apart<Unit, Rows>(&tile[0][column], Columns, left, left_stride, one, right_stride, num_steps,
                                         [=](int step, int) TANDEM_INLINE_LAMBDA { fetch(step, column); });
        }
    }
}

// Call visit(std::integral_constant<int, Size>) for a `size` of Least to Most that only the running program knows.
template <int Least, int Most, class Visit>
TANDEM_INLINE void with_constant(int size, Visit&& visit) {
    if constexpr (Least < Most) {
        if (size < Most) return with_constant<Least, Most - 1>(size, visit);
    }
    visit(std::integral_constant<int, Most>{});
}

// Call visit(std::integral_constant<int, Size>, first) for even parts, each of 1 to Most, that cover [0, count).
template <int Most, class Visit>
TANDEM_INLINE void visit_parts(int count, Visit&& visit) {
    int parts_left = (count + Most - 1) / Most;
    for (int first = 0; first < count; --parts_left) {
        const int size = (count - first + parts_left - 1) / parts_left;
        with_constant<1, Most>(size, [&](auto constant) TANDEM_INLINE_LAMBDA { visit(constant, first); });
        first += size;
    }
}

}  // namespace tandem
