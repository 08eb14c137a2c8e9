// Sixteen float32 lanes, and the operations on them that differ between instruction sets.
//
// GCC's and Clang's vector extensions carry the plain arithmetic on every machine; only what they cannot say (a fused
// multiply-add, a bfloat16 dot product) is written with AVX-512 intrinsics, with a portable form beside it.
#pragma once

#include <cstdint>
#include <cstring>

#if !defined(TANDEM_PORTABLE) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define TANDEM_AVX512 1
#include <immintrin.h>
#else
#define TANDEM_AVX512 0
#endif

#if TANDEM_AVX512 && defined(__AVX512BF16__)
#define TANDEM_AVX512_BF16 1
#else
#define TANDEM_AVX512_BF16 0
#endif

#define TANDEM_INLINE_LAMBDA __attribute__((always_inline))
#define TANDEM_INLINE inline TANDEM_INLINE_LAMBDA

namespace tandem {

constexpr int num_lanes = 16;

#if TANDEM_AVX512_BF16
constexpr const char* instruction_set = "avx512bf16";
#elif TANDEM_AVX512
constexpr const char* instruction_set = "avx512";
#else
constexpr const char* instruction_set = "portable";
#endif

typedef float Lanes __attribute__((vector_size(64)));
typedef std::uint32_t LaneBits __attribute__((vector_size(64)));
typedef std::uint16_t LaneHalves __attribute__((vector_size(32)));
typedef float LanesInMemory __attribute__((vector_size(64), aligned(4), may_alias));
typedef std::uint32_t LaneBitsInMemory __attribute__((vector_size(64), aligned(4), may_alias));
typedef std::uint16_t LaneHalvesInMemory __attribute__((vector_size(32), aligned(2), may_alias));

// A unit is what one step of a product takes from each row: one float32, or two neighbouring bfloat16 values (the
// first in the low half). Every operand lies in memory as units, so that one kernel serves both dtypes.
using Pair = std::uint32_t;

template <class Unit>
constexpr int values_per_unit = 1;
template <>
constexpr int values_per_unit<Pair> = 2;

TANDEM_INLINE Lanes load(const float* from) { return *reinterpret_cast<const LanesInMemory*>(from); }
TANDEM_INLINE LaneBits load(const Pair* from) { return *reinterpret_cast<const LaneBitsInMemory*>(from); }
TANDEM_INLINE void store(float* to, Lanes lanes) { *reinterpret_cast<LanesInMemory*>(to) = lanes; }
TANDEM_INLINE void store(Pair* to, LaneBits lanes) { *reinterpret_cast<LaneBitsInMemory*>(to) = lanes; }

TANDEM_INLINE LaneBits broadcast(Pair value) { return value - LaneBits{}; }

TANDEM_INLINE Lanes broadcast(float value) {
#if TANDEM_AVX512
    return _mm512_set1_ps(value);
#else
    return value - Lanes{};
#endif
}

// factor * other + sum: rounded once with AVX-512, twice in the portable form (a numeric class of its own).
TANDEM_INLINE Lanes multiply_add(Lanes factor, Lanes other, Lanes sum) {
#if TANDEM_AVX512
    return _mm512_fmadd_ps(factor, other, sum);
#else
    return factor * other + sum;
#endif
}

TANDEM_INLINE Lanes widen_low_half(LaneBits pairs) { return reinterpret_cast<Lanes>(pairs << 16); }
TANDEM_INLINE Lanes widen_high_half(LaneBits pairs) { return reinterpret_cast<Lanes>(pairs & 0xffff0000u); }

// Both products of each lane's pairs, added to the sum.
TANDEM_INLINE Lanes multiply_add(LaneBits factor, LaneBits other, Lanes sum) {
#if TANDEM_AVX512_BF16
    return _mm512_dpbf16_ps(sum, (__m512bh)factor, (__m512bh)other);
#else
    sum = multiply_add(widen_low_half(factor), widen_low_half(other), sum);
    return multiply_add(widen_high_half(factor), widen_high_half(other), sum);
#endif
}

TANDEM_INLINE Lanes maximum(Lanes one, Lanes other) {
#if TANDEM_AVX512
    return _mm512_max_ps(one, other);
#else
    return one > other ? one : other;
#endif
}

TANDEM_INLINE Lanes minimum(Lanes one, Lanes other) {
#if TANDEM_AVX512
    return _mm512_min_ps(one, other);
#else
    return one < other ? one : other;
#endif
}

// Round to bfloat16, ties to even.
TANDEM_INLINE LaneHalves round_to_bfloat16(Lanes lanes) {
#if TANDEM_AVX512_BF16
    return (LaneHalves)_mm512_cvtneps_pbh(lanes);
#else
    const LaneBits bits = reinterpret_cast<LaneBits>(lanes);
    return __builtin_convertvector((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16, LaneHalves);
#endif
}

TANDEM_INLINE Lanes widen(LaneHalves halves) {
    return reinterpret_cast<Lanes>(__builtin_convertvector(halves, LaneBits) << 16);
}

// Sixteen neighbouring values in a row of units, rounded to the row's dtype. Returns what the row now holds.
TANDEM_INLINE Lanes store_values(float* to, Lanes lanes) {
    store(to, lanes);
    return lanes;
}
TANDEM_INLINE Lanes store_values(Pair* to, Lanes lanes) {
    const LaneHalves rounded = round_to_bfloat16(lanes);
    *reinterpret_cast<LaneHalvesInMemory*>(to) = rounded;
    return widen(rounded);
}

// Two times sixteen neighbouring values, rounded.
TANDEM_INLINE LaneBits round_to_pairs(Lanes first, Lanes second) {
#if TANDEM_AVX512_BF16
    return (LaneBits)_mm512_cvtne2ps_pbh(second, first);
#else
    LaneBits pairs;
    store_values(reinterpret_cast<Pair*>(&pairs), first);
    store_values(reinterpret_cast<Pair*>(&pairs) + num_lanes / 2, second);
    return pairs;
#endif
}

TANDEM_INLINE Lanes load_values(const float* from) { return load(from); }
TANDEM_INLINE Lanes load_values(const Pair* from) { return widen(*reinterpret_cast<const LaneHalvesInMemory*>(from)); }

// Sixteen small integers as floats: 8 bits with sign, and the lowest 4 bits of each lane.
TANDEM_INLINE Lanes load_int8(const std::int8_t* from) {
#if TANDEM_AVX512
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
    Lanes lanes;
    for (int lane = 0; lane < num_lanes; ++lane) lanes[lane] = from[lane];
    return lanes;
#endif
}
TANDEM_INLINE Lanes low_4_bits(LaneBits lanes) {
#if TANDEM_AVX512
    const Lanes integers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return _mm512_permutexvar_ps((__m512i)lanes, integers);
#else
    typedef std::int32_t LaneIntegers __attribute__((vector_size(64)));
    return __builtin_convertvector(reinterpret_cast<LaneIntegers>(lanes & 15u), Lanes);
#endif
}

// Sixteen finite float16 values.
TANDEM_INLINE Lanes load_float16(const std::uint16_t* from) {
    const LaneHalves halves = *reinterpret_cast<const LaneHalvesInMemory*>(from);
#if TANDEM_AVX512
    return _mm512_cvtph_ps((__m256i)halves);
#else
    const LaneBits bits = __builtin_convertvector(halves, LaneBits);
    // Exponent and fraction moved into place count 2^112 too little: the multiplication is exact, subnormals included.
    const Lanes magnitude = reinterpret_cast<Lanes>((bits & 0x7fffu) << 13) * 0x1p112f;
    return reinterpret_cast<Lanes>(reinterpret_cast<LaneBits>(magnitude) | (bits & 0x8000u) << 16);
#endif
}

// Each of the first, or last, eight lanes twice.
TANDEM_INLINE Lanes double_lower_half(Lanes lanes) {
    return __builtin_shufflevector(lanes, lanes, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
}
TANDEM_INLINE Lanes double_upper_half(Lanes lanes) {
    return __builtin_shufflevector(lanes, lanes, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15);
}

// Keep the first `count` lanes and put `other` into the rest.
TANDEM_INLINE Lanes keep_first(Lanes lanes, int count, float other) {
    for (int lane = 0; lane < num_lanes; ++lane) lanes[lane] = lane < count ? lanes[lane] : other;
    return lanes;
}

// Sum and maximum of the lanes, folded in halves: a fixed order.
TANDEM_INLINE float sum_of(Lanes lanes) {
    alignas(64) float folded[num_lanes];
    store(folded, lanes);
    for (int half = num_lanes / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; ++lane) folded[lane] += folded[lane + half];
    return folded[0];
}
TANDEM_INLINE float maximum_of(Lanes lanes) {
    alignas(64) float folded[num_lanes];
    store(folded, lanes);
    for (int half = num_lanes / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; ++lane)
            folded[lane] = folded[lane] > folded[lane + half] ? folded[lane] : folded[lane + half];
    return folded[0];
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
    return reinterpret_cast<Lanes>(reinterpret_cast<LaneBits>(series) + (reinterpret_cast<LaneBits>(shifted) << 23));
}

constexpr int line_bytes = 64;

// Ask for a line of memory that is read soon, into the second-level cache: misses of the first level are too few at a time
// to fill the memory bus.
// GCC 12 takes a function that only prefetches for one without effect and drops its calls: hence the assembly.
TANDEM_INLINE void prefetch(const void* line) {
#if defined(__x86_64__)
    asm volatile("prefetcht1 %0" : : "m"(*static_cast<const char*>(line)));
#else
    __builtin_prefetch(line, 0, 2);
#endif
}

// The same for the two lines that lie `Ahead` bytes behind `first`, cheap enough for an inner loop: one address, whatever
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
