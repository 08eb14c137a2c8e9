// What the kernels compute with: units of 4 bytes, sixteen of them at a time.
#pragma once

#include <cstdint>
#include <cstring>

#define TANDEM_INLINE_LAMBDA __attribute__((always_inline))
#define TANDEM_INLINE inline TANDEM_INLINE_LAMBDA

namespace tandem {

constexpr int num_lanes = 16;

// A unit is what one step of a product takes from each row: one float32, or two neighbouring bfloat16 values (the
// first in the low half). Weights held as floats, and KV, lie in memory as units; left sides as factors (simd.h).
using Pair = std::uint32_t;
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "a unit's first value lies in its low half");

template <class Unit>
constexpr int values_per_unit = 1;
template <>
constexpr int values_per_unit<Pair> = 2;

inline float value_of(float unit, int) { return unit; }
inline float value_of(Pair unit, int index) {
    const std::uint32_t bits = index == 0 ? unit << 16 : unit & 0xffff0000u;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

}  // namespace tandem
