// Sixteen lanes in one AVX-512 register.
//
// The compilers' vector extensions carry the plain arithmetic; what they cannot say is written with intrinsics.
#pragma once

#include <immintrin.h>

#include "units.h"

#if defined(__AVX512BF16__)
#define TANDEM_PAIR_PRODUCTS 1
#else
#define TANDEM_PAIR_PRODUCTS 0
#endif

namespace tandem {

constexpr const char* instruction_set = TANDEM_PAIR_PRODUCTS ? "avx512bf16" : "avx512";

typedef float Lanes __attribute__((vector_size(64)));
typedef std::uint32_t LaneBits __attribute__((vector_size(64)));
typedef std::uint16_t LaneHalves __attribute__((vector_size(32)));
typedef float LanesInMemory __attribute__((vector_size(64), aligned(4), may_alias));
typedef std::uint32_t LaneBitsInMemory __attribute__((vector_size(64), aligned(4), may_alias));
typedef std::uint16_t LaneHalvesInMemory __attribute__((vector_size(32), aligned(2), may_alias));

TANDEM_INLINE Lanes load(const float* from) { return *reinterpret_cast<const LanesInMemory*>(from); }
TANDEM_INLINE LaneBits load(const Pair* from) { return *reinterpret_cast<const LaneBitsInMemory*>(from); }
TANDEM_INLINE LaneHalves load(const std::uint16_t* from) { return *reinterpret_cast<const LaneHalvesInMemory*>(from); }
TANDEM_INLINE void store(float* to, Lanes lanes) { *reinterpret_cast<LanesInMemory*>(to) = lanes; }
TANDEM_INLINE void store(Pair* to, LaneBits lanes) { *reinterpret_cast<LaneBitsInMemory*>(to) = lanes; }
TANDEM_INLINE void store(std::uint16_t* to, LaneHalves lanes) { *reinterpret_cast<LaneHalvesInMemory*>(to) = lanes; }

TANDEM_INLINE Lanes as_floats(LaneBits bits) { return reinterpret_cast<Lanes>(bits); }
TANDEM_INLINE LaneBits as_bits(Lanes lanes) { return reinterpret_cast<LaneBits>(lanes); }
TANDEM_INLINE LaneBits widen_bits(LaneHalves halves) { return __builtin_convertvector(halves, LaneBits); }
TANDEM_INLINE LaneHalves narrow_bits(LaneBits bits) { return __builtin_convertvector(bits, LaneHalves); }

TANDEM_INLINE LaneBits broadcast(Pair value) { return value - LaneBits{}; }
TANDEM_INLINE Lanes broadcast(float value) { return _mm512_set1_ps(value); }

// factor * other + sum, rounded once.
TANDEM_INLINE Lanes multiply_add(Lanes factor, Lanes other, Lanes sum) { return _mm512_fmadd_ps(factor, other, sum); }

#if TANDEM_PAIR_PRODUCTS
// Both products of each lane's pairs, added to the sum.
TANDEM_INLINE Lanes multiply_add(LaneBits factor, LaneBits other, Lanes sum) {
    return _mm512_dpbf16_ps(sum, (__m512bh)factor, (__m512bh)other);
}
#endif

TANDEM_INLINE Lanes maximum(Lanes one, Lanes other) { return _mm512_max_ps(one, other); }
TANDEM_INLINE Lanes minimum(Lanes one, Lanes other) { return _mm512_min_ps(one, other); }

// Sixteen small integers as floats: 8 bits with sign, and the lowest 4 bits of each lane.
TANDEM_INLINE Lanes load_int8(const std::int8_t* from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
TANDEM_INLINE Lanes low_4_bits(LaneBits lanes) {
    const Lanes integers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return _mm512_permutexvar_ps((__m512i)lanes, integers);
}

// Sixteen finite float16 values.
TANDEM_INLINE Lanes load_float16(const std::uint16_t* from) { return _mm512_cvtph_ps((__m256i)load(from)); }

#if TANDEM_PAIR_PRODUCTS
// Rounded to bfloat16, ties to even: sixteen values, or two times sixteen that are neighbours.
TANDEM_INLINE LaneHalves round_to_bfloat16(Lanes lanes) { return (LaneHalves)_mm512_cvtneps_pbh(lanes); }
TANDEM_INLINE LaneBits round_to_pairs(Lanes first, Lanes second) {
    return (LaneBits)_mm512_cvtne2ps_pbh(second, first);
}

// Each of the first, or last, eight lanes twice.
TANDEM_INLINE Lanes double_lower_half(Lanes lanes) {
    return __builtin_shufflevector(lanes, lanes, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
}
TANDEM_INLINE Lanes double_upper_half(Lanes lanes) {
    return __builtin_shufflevector(lanes, lanes, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15);
}
#endif

// Keep the first `count` lanes and put `other` into the rest.
TANDEM_INLINE Lanes keep_first(Lanes lanes, int count, float other) {
    for (int lane = 0; lane < num_lanes; ++lane) lanes[lane] = lane < count ? lanes[lane] : other;
    return lanes;
}

}  // namespace tandem
