// Blocks of quantised weights, unpacked to units.
//
// A weight is scale * value (+ minimum), with float16 scales and small integers, as a GGUF defines it. The product is
// exact in float32 (11 bits of scale by at most 8 of value), so that a fused multiply-add and a rounded sum give the
// same bits: those of the dequantised matrix.
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

// Each group's factors: one to an output, for every value of a unit.
template <class Unit>
struct GroupFactors {
    static constexpr int num_groups = panel_vectors * values_per_unit<Unit>;
    Lanes lanes[num_groups];

    // from: 32 float16.
    explicit GroupFactors(const std::uint16_t* from) {
        for (int vector = 0; vector < panel_vectors; ++vector) {
            const Lanes factors = load_float16(from + vector * num_lanes);
            if constexpr (values_per_unit<Unit> == 1) {
                lanes[vector] = factors;
            } else {
                lanes[2 * vector] = double_lower_half(factors);
                lanes[2 * vector + 1] = double_upper_half(factors);
            }
        }
    }
};

// Write one step: the groups' weights in order, rounded to units.
template <class Unit>
TANDEM_INLINE void store_step(Unit* to, const Lanes (&groups)[GroupFactors<Unit>::num_groups]) {
    for (int pair = 0; pair < GroupFactors<Unit>::num_groups; pair += 2)
        store_two(to + pair * (num_lanes / values_per_unit<Unit>), groups[pair], groups[pair + 1]);
}

template <class Unit>
TANDEM_INLINE void unpack_block_of_4_bits(const char* block, bool has_minima, Unit* units) {
    constexpr int num_groups = GroupFactors<Unit>::num_groups, word_steps = 8;
    const auto* factors = reinterpret_cast<const std::uint16_t*>(block);
    const GroupFactors<Unit> scales(factors);
    GroupFactors<Unit> minima(factors + (has_minima ? panel_columns : 0));
    if (!has_minima)  // scale * (value - 8): exact as scale * value - 8 * scale
        for (Lanes& minimum : minima.lanes) minimum = minimum * -8.0f;
    const auto* words = reinterpret_cast<const Pair*>(factors + (has_minima ? 2 : 1) * panel_columns);
    for (int first_step = 0; first_step < block_steps<Unit>; first_step += word_steps) {
        LaneBits bits[num_groups];
        for (int group = 0; group < num_groups; ++group, words += num_lanes) bits[group] = load(words);
#pragma GCC unroll 8
        for (int step = 0; step < word_steps; ++step) {
            Lanes groups[num_groups];
#pragma GCC unroll 4
            for (int group = 0; group < num_groups; ++group)
                groups[group] =
                    multiply_add(scales.lanes[group], low_4_bits(bits[group] >> (4 * step)), minima.lanes[group]);
            store_step<Unit>(units + (first_step + step) * panel_columns, groups);
        }
    }
}

template <class Unit>
TANDEM_INLINE void unpack_block_of_8_bits(const char* block, Unit* units) {
    constexpr int num_groups = GroupFactors<Unit>::num_groups;
    const GroupFactors<Unit> scales(reinterpret_cast<const std::uint16_t*>(block));
    const auto* values = reinterpret_cast<const std::int8_t*>(block + 2 * panel_columns);
#pragma GCC unroll 4
    for (int step = 0; step < block_steps<Unit>; ++step) {
        Lanes groups[num_groups];
#pragma GCC unroll 4
        for (int group = 0; group < num_groups; ++group, values += num_lanes)
            groups[group] = scales.lanes[group] * load_int8(values);
        store_step<Unit>(units + step * panel_columns, groups);
    }
}

// Unpack blocks that lie one after another: `units` gets [num_blocks * block_steps][32 outputs].
template <class Unit>
__attribute__((noinline)) void unpack_blocks(TandemStorage storage, const char* block, long num_blocks, Unit* units) {
    for (long index = 0; index < num_blocks; ++index) {
        switch (storage) {
            case tandem_q4_0: unpack_block_of_4_bits<Unit>(block, false, units); break;
            case tandem_q4_1: unpack_block_of_4_bits<Unit>(block, true, units); break;
            default: unpack_block_of_8_bits<Unit>(block, units);
        }
        block += packed_block_bytes(storage);
        units += block_steps<Unit> * panel_columns;
    }
}

}  // namespace tandem
