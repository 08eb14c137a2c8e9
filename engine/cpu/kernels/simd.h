// Sixteen float32 lanes, and the operations on them: what differs between instruction sets is in lanes_avx512.h and
// lanes_in_parts.h, which say the same with other registers.
#pragma once

#include <type_traits>

#if !defined(TANDEM_PORTABLE) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define TANDEM_AVX512 1
#include "lanes_avx512.h"
#else
#define TANDEM_AVX512 0
#include "lanes_in_parts.h"
#endif

namespace tandem {

// What the left side of a product lies in memory as: units where the processor multiplies pairs, else floats that are
// rounded to the dtype. A float is broadcast as it is loaded; a pair would have to be widened again for every column.
template <class Unit>
using Factor = std::conditional_t<TANDEM_PAIR_PRODUCTS, Unit, float>;

template <class Unit>
constexpr int values_per_factor = values_per_unit<Factor<Unit>>;
template <class Unit>
constexpr int factors_per_unit = values_per_unit<Unit> / values_per_factor<Unit>;

// What a step's factor `index` is multiplied with.
TANDEM_INLINE Lanes column_values(Lanes units, int) { return units; }
#if TANDEM_PAIR_PRODUCTS
TANDEM_INLINE LaneBits column_values(LaneBits pairs, int) { return pairs; }
#else
TANDEM_INLINE Lanes column_values(LaneBits pairs, int index) {
    return as_floats(index == 0 ? pairs << 16 : pairs & 0xffff0000u);
}

// Rounded to bfloat16, ties to even, with rubbish in the lower halves.
TANDEM_INLINE LaneBits round_upper_halves(Lanes lanes) {
    const LaneBits bits = as_bits(lanes);
    return bits + 0x7fffu + ((bits >> 16) & 1u);
}
TANDEM_INLINE LaneHalves round_to_bfloat16(Lanes lanes) { return narrow_bits(round_upper_halves(lanes) >> 16); }
#endif

TANDEM_INLINE Lanes widen(LaneHalves halves) { return as_floats(widen_bits(halves) << 16); }

// Sixteen neighbouring values in a row of units, rounded to the row's dtype. Returns what the row now holds.
TANDEM_INLINE Lanes store_values(float* to, Lanes lanes) {
    store(to, lanes);
    return lanes;
}
TANDEM_INLINE Lanes store_values(Pair* to, Lanes lanes) {
    const LaneHalves rounded = round_to_bfloat16(lanes);
    store(reinterpret_cast<std::uint16_t*>(to), rounded);
    return widen(rounded);
}

// The same in a row of factors.
template <class Unit>
TANDEM_INLINE Lanes store_factors(Factor<Unit>* to, Lanes lanes) {
#if !TANDEM_PAIR_PRODUCTS
    if constexpr (values_per_unit<Unit> == 2)
        return store_values(to, as_floats(round_upper_halves(lanes) & 0xffff0000u));
#endif
    return store_values(to, lanes);
}

TANDEM_INLINE Lanes load_values(const float* from) { return load(from); }
TANDEM_INLINE Lanes load_values(const Pair* from) { return widen(load(reinterpret_cast<const std::uint16_t*>(from))); }

// The lanes folded in halves: a fixed order. Unrolled, as GCC has no registers for a loop's lanes.
template <class Combine>
TANDEM_INLINE float fold(Lanes lanes, Combine&& combine) {
    alignas(64) float folded[num_lanes];
    store(folded, lanes);
#pragma GCC unroll 4
    for (int half = num_lanes / 2; half > 0; half /= 2)
#pragma GCC unroll 8
        for (int lane = 0; lane < half; ++lane) folded[lane] = combine(folded[lane], folded[lane + half]);
    return folded[0];
}
TANDEM_INLINE float sum_of(Lanes lanes) {
    return fold(lanes, [](float one, float other) TANDEM_INLINE_LAMBDA { return one + other; });
}
TANDEM_INLINE float maximum_of(Lanes lanes) {
    return fold(lanes, [](float one, float other) TANDEM_INLINE_LAMBDA { return one > other ? one : other; });
}

// e^x to about 1 unit in the last place, for x of at most 88; x below -87 counts as -87.
// Source: Cephes expf (range reduction in two parts, polynomial of degree 5).
TANDEM_INLINE Lanes exponential(Lanes x) {
    x = maximum(x, broadcast(-87.0f));
    // Adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the low bits.
    const Lanes shifted = multiply_add(x, broadcast(1.44269504088896341f), broadcast(12582912.0f));
    const Lanes power = shifted - 12582912.0f;
    Lanes rest = multiply_add(power, broadcast(-0.693359375f), x);
    rest = multiply_add(power, broadcast(2.12194440e-4f), rest);
    Lanes series = multiply_add(broadcast(1.9875691500e-4f), rest, broadcast(1.3981999507e-3f));
    series = multiply_add(series, rest, broadcast(8.3334519073e-3f));
    series = multiply_add(series, rest, broadcast(4.1665795894e-2f));
    series = multiply_add(series, rest, broadcast(1.6666665459e-1f));
    series = multiply_add(series, rest, broadcast(5.0000001201e-1f));
    series = multiply_add(series, rest * rest, rest + 1.0f);
    return as_floats(as_bits(series) + (as_bits(shifted) << 23));
}

constexpr int line_bytes = 64;

// Ask for a line of memory that is read soon, into the second-level cache: misses of the first level are too few at a
// time to fill the memory bus. GCC 12 takes a function that only prefetches for one without effect and drops its calls:
// hence the assembly.
TANDEM_INLINE void prefetch(const void* line) {
#if defined(__x86_64__)
    asm volatile("prefetcht1 %0" : : "m"(*static_cast<const char*>(line)));
#else
    __builtin_prefetch(line, 0, 2);
#endif
}

// The same for the two lines that lie `Ahead` bytes past `first`, cheap enough for an inner loop: one address, whatever
// the distance.
template <int Ahead>
TANDEM_INLINE void prefetch_ahead(const void* first) {
#if defined(__x86_64__)
    asm volatile("prefetcht1 %c1(%0)\n\tprefetcht1 %c2(%0)" : : "r"(first), "i"(Ahead), "i"(Ahead + line_bytes));
#else
    __builtin_prefetch(static_cast<const char*>(first) + Ahead, 0, 2);
    __builtin_prefetch(static_cast<const char*>(first) + Ahead + line_bytes, 0, 2);
#endif
}

}  // namespace tandem
