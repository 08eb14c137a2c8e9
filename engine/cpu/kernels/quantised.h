// Blocks of quantised weights, unpacked to units: to pairs only where they are multiplied as pairs, else to floats,
// which are not rounded to a model's bfloat16.
//
// A weight is scale * value (+ minimum), with float16 scales and small integers, as a GGUF defines it. The product is
// exact in float32 (11 bits of scale by at most 8 of value), so that a fused multiply-add and a rounded sum give the
// same bits: those of the matrix dequantised to what the units hold.
// Source: ggml's block_q4_0, block_q4_1, block_q8_0; engine/cpu/packing.py writes the order below.
#pragma once

#include "model.h"
#include "simd.h"
#include "tile.h"

namespace tandem {

// A packed block holds 32 inputs of the panel's 32 outputs: 32 float16 scales, 32 float16 minima (Q4_1), and the values
// in the order of the units that they become, sixteen (`group`) at a time. Values of 4 bits lie eight to a word: those
// of one group in eight steps.
constexpr int block_inputs = 32;

template <class Unit>
constexpr int block_steps = block_inputs / values_per_unit<Unit>;

constexpr long packed_block_bytes(TandemStorage storage) {
    return 2 * panel_columns * (storage == tandem_q4_1 ? 2 : 1) +
           panel_columns * block_inputs / (storage == tandem_q8_0 ? 1 : 2);
}

// Of sixteen values each: what a step's units are made from.
template <class Unit>
constexpr int num_groups = panel_vectors * values_per_unit<Unit>;

// Each group's scales or minima, from 32 float16: one to an output, for every value of a unit.
TANDEM_INLINE void load_scales(const std::uint16_t* from, Lanes (&groups)[num_groups<float>]) {
    for (int vector = 0; vector < panel_vectors; ++vector) groups[vector] = load_float16(from + vector * num_lanes);
}
#if TANDEM_PAIR_PRODUCTS
TANDEM_INLINE void load_scales(const std::uint16_t* from, Lanes (&groups)[num_groups<Pair>]) {
    for (int vector = 0; vector < panel_vectors; ++vector) {
        const Lanes scales = load_float16(from + vector * num_lanes);
        groups[2 * vector] = double_lower_half(scales);
        groups[2 * vector + 1] = double_upper_half(scales);
    }
}
#endif

// Call visit(step, vector, units) for both vectors of a step, of whose groups weights(group) gives the sixteen values.
template <class Unit, class Visit, class Weights>
TANDEM_INLINE void visit_groups(int step, Visit&& visit, Weights&& weights) {
#pragma GCC unroll 2
    for (int vector = 0; vector < panel_vectors; ++vector)
        if constexpr (values_per_unit<Unit> == 1)
            visit(step, vector, weights(vector));
        else
            visit(step, vector, round_to_pairs(weights(2 * vector), weights(2 * vector + 1)));
}

// Call visit(step, vector, units) for all of a block's units, sixteen at a time, in the order of steps.
template <class Unit, class Visit>
TANDEM_INLINE void visit_block_of_4_bits(const char* block, bool has_minima, Visit&& visit) {
    constexpr int word_steps = 8;
    const auto* stored_scales = reinterpret_cast<const std::uint16_t*>(block);
    Lanes scales[num_groups<Unit>], minima[num_groups<Unit>];
    load_scales(stored_scales, scales);
    load_scales(stored_scales + (has_minima ? panel_columns : 0), minima);
    if (!has_minima)  // scale * (value - 8): exact as scale * value - 8 * scale
        for (Lanes& minimum : minima) minimum = minimum * -8.0f;
    const auto* words = reinterpret_cast<const std::uint32_t*>(stored_scales + (has_minima ? 2 : 1) * panel_columns);
    for (int first_step = 0; first_step < block_steps<Unit>; first_step += word_steps) {
        LaneBits bits[num_groups<Unit>];
        for (LaneBits& group : bits) {
            group = load(words);
            words += num_lanes;
        }
#pragma GCC unroll 8
        for (int step = 0; step < word_steps; ++step)
            visit_groups<Unit>(first_step + step, visit, [&](int group) TANDEM_INLINE_LAMBDA {
                return multiply_add(scales[group], low_4_bits(bits[group] >> (4 * step)), minima[group]);
            });
    }
}

template <class Unit, class Visit>
TANDEM_INLINE void visit_block_of_8_bits(const char* block, Visit&& visit) {
    Lanes scales[num_groups<Unit>];
    load_scales(reinterpret_cast<const std::uint16_t*>(block), scales);
    const auto* values = reinterpret_cast<const std::int8_t*>(block + 2 * panel_columns);
#pragma GCC unroll 4
    for (int step = 0; step < block_steps<Unit>; ++step, values += num_groups<Unit> * num_lanes)
        visit_groups<Unit>(step, visit, [&](int group) TANDEM_INLINE_LAMBDA {
            return scales[group] * load_int8(values + group * num_lanes);
        });
}

template <class Unit, class Visit>
TANDEM_INLINE void visit_block(TandemStorage storage, const char* block, Visit&& visit) {
    switch (storage) {
        case tandem_q4_0:
            return visit_block_of_4_bits<Unit>(block, false, visit);
        case tandem_q4_1:
            return visit_block_of_4_bits<Unit>(block, true, visit);
        default:
            visit_block_of_8_bits<Unit>(block, visit);
    }
}

// Unpack blocks that lie one after another: `units` gets [num_blocks * block_steps][32 outputs].
template <class Unit>
__attribute__((noinline)) void unpack_blocks(TandemStorage storage, const char* block, long num_blocks, Unit* units) {
    for (long index = 0; index < num_blocks; ++index) {
        visit_block<Unit>(storage, block, [=](int step, int vector, auto lanes) TANDEM_INLINE_LAMBDA {
            store(units + step * panel_columns + vector * num_lanes, lanes);
        });
        block += packed_block_bytes(storage);
        units += block_steps<Unit> * panel_columns;
    }
}

// `accumulate` (tile.h) of a panel's blocks, which are unpacked on the way and need no memory for it. A function by
// itself as `accumulate_apart` is.
//   left: rows `left_stride` units apart.
template <class Unit, int Rows>
__attribute__((noinline)) void accumulate_blocks(Tile<Rows, panel_vectors>& sums, const Unit* left, long left_stride,
                                                 TandemStorage storage, const char* block, long num_blocks) {
    Tile<Rows, panel_vectors> tile;
    copy_tile(sums, tile);
    for (long index = 0; index < num_blocks; ++index) {
        visit_block<Unit>(storage, block, [&](int step, int vector, auto lanes) TANDEM_INLINE_LAMBDA {
#pragma GCC unroll 12
            for (int row = 0; row < Rows; ++row)
                tile[row][vector] = multiply_add(broadcast(left[row * left_stride + step]), lanes, tile[row][vector]);
        });
        block += packed_block_bytes(storage);
        left += block_steps<Unit>;
    }
    copy_tile(tile, sums);
}

}  // namespace tandem
