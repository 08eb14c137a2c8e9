// Sixteen lanes in registers of eight (AVX2) or four (any machine), as one value: GCC keeps a vector that is wider than
// the registers in memory.
#pragma once

#include "units.h"

#if !defined(TANDEM_PORTABLE) && defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define TANDEM_AVX2 1
#include <immintrin.h>
#else
#define TANDEM_AVX2 0
#endif

#define TANDEM_PAIR_PRODUCTS 0

namespace tandem {

constexpr const char* instruction_set = TANDEM_AVX2 ? "avx2" : "portable";
constexpr int part_lanes = TANDEM_AVX2 ? 8 : 4, num_parts = num_lanes / part_lanes;

template <class Value>
struct InParts {
    typedef Value Part __attribute__((vector_size(part_lanes * sizeof(Value))));
    typedef Value PartInMemory
        __attribute__((vector_size(part_lanes * sizeof(Value)), aligned(sizeof(Value)), may_alias));

    Part parts[num_parts];

    InParts() = default;
    TANDEM_INLINE InParts(Value value) {  // in all lanes
        each_part([&](int part) TANDEM_INLINE_LAMBDA { parts[part] = value - Part{}; });
    }

    template <class Visit>
    static TANDEM_INLINE void each_part(Visit&& visit) {
#pragma GCC unroll 4
        for (int part = 0; part < num_parts; ++part) visit(part);
    }

    static TANDEM_INLINE InParts loaded(const Value* from) {
        InParts lanes;
        each_part([&](int part) TANDEM_INLINE_LAMBDA {
            lanes.parts[part] = *reinterpret_cast<const PartInMemory*>(from + part * part_lanes);
        });
        return lanes;
    }
    TANDEM_INLINE void store(Value* to) const {
        each_part([&](int part) TANDEM_INLINE_LAMBDA {
            *reinterpret_cast<PartInMemory*>(to + part * part_lanes) = parts[part];
        });
    }

    // combine(part of one, part of other) for each.
    template <class Combine>
    static TANDEM_INLINE InParts combined(const InParts& one, const InParts& other, Combine&& combine) {
        InParts lanes;
        each_part([&](int part) TANDEM_INLINE_LAMBDA {
            lanes.parts[part] = combine(one.parts[part], other.parts[part]);
        });
        return lanes;
    }

#define TANDEM_OPERATOR(op)                                                                                    \
    friend TANDEM_INLINE InParts operator op(const InParts& one, const InParts& other) {                       \
        return combined(one, other, [](Part left, Part right) TANDEM_INLINE_LAMBDA { return left op right; }); \
    }
    TANDEM_OPERATOR(+)
    TANDEM_OPERATOR(-)
    TANDEM_OPERATOR(*)
    TANDEM_OPERATOR(/)
    TANDEM_OPERATOR(&)
    TANDEM_OPERATOR(|)
    TANDEM_OPERATOR(<<)
    TANDEM_OPERATOR(>>)
#undef TANDEM_OPERATOR

    friend TANDEM_INLINE InParts operator-(const InParts& lanes) {
        return combined(lanes, lanes, [](Part part, Part) TANDEM_INLINE_LAMBDA { return -part; });
    }
    TANDEM_INLINE InParts& operator+=(const InParts& other) { return *this = *this + other; }
};

using Lanes = InParts<float>;
using LaneBits = InParts<std::uint32_t>;
using LaneHalves = InParts<std::uint16_t>;

template <class Value>
TANDEM_INLINE InParts<Value> load(const Value* from) { return InParts<Value>::loaded(from); }
template <class Value>
TANDEM_INLINE void store(Value* to, const InParts<Value>& lanes) { lanes.store(to); }

// convert(part) for each.
template <class To, class From, class Convert>
TANDEM_INLINE To converted(const From& from, Convert&& convert) {
    To lanes;
    From::each_part([&](int part) TANDEM_INLINE_LAMBDA { lanes.parts[part] = convert(from.parts[part]); });
    return lanes;
}
TANDEM_INLINE Lanes as_floats(const LaneBits& bits) {
    return converted<Lanes>(bits, [](LaneBits::Part part) TANDEM_INLINE_LAMBDA { return (Lanes::Part)part; });
}
TANDEM_INLINE LaneBits as_bits(const Lanes& lanes) {
    return converted<LaneBits>(lanes, [](Lanes::Part part) TANDEM_INLINE_LAMBDA { return (LaneBits::Part)part; });
}
TANDEM_INLINE LaneBits widen_bits(const LaneHalves& halves) {
    return converted<LaneBits>(halves, [](LaneHalves::Part part) TANDEM_INLINE_LAMBDA {
#if TANDEM_AVX2
        return (LaneBits::Part)_mm256_cvtepu16_epi32((__m128i)part);
#else
        return __builtin_convertvector(part, LaneBits::Part);
#endif
    });
}

TANDEM_INLINE LaneHalves narrow_bits(const LaneBits& bits) {
    return converted<LaneHalves>(
        bits, [](LaneBits::Part part) TANDEM_INLINE_LAMBDA { return __builtin_convertvector(part, LaneHalves::Part); });
}

TANDEM_INLINE LaneBits broadcast(Pair value) { return value; }
TANDEM_INLINE Lanes broadcast(float value) { return value; }

// factor * other + sum: rounded once with AVX2, twice in the portable form (a numeric class of its own).
TANDEM_INLINE Lanes multiply_add(const Lanes& factor, const Lanes& other, const Lanes& sum) {
    Lanes lanes;
    Lanes::each_part([&](int part) TANDEM_INLINE_LAMBDA {
#if TANDEM_AVX2
        lanes.parts[part] = _mm256_fmadd_ps(factor.parts[part], other.parts[part], sum.parts[part]);
#else
        lanes.parts[part] = factor.parts[part] * other.parts[part] + sum.parts[part];
#endif
    });
    return lanes;
}

TANDEM_INLINE Lanes maximum(const Lanes& one, const Lanes& other) {
    return Lanes::combined(one, other, [](Lanes::Part left, Lanes::Part right) TANDEM_INLINE_LAMBDA {
#if TANDEM_AVX2
        return (Lanes::Part)_mm256_max_ps(left, right);
#else
        return left > right ? left : right;
#endif
    });
}
TANDEM_INLINE Lanes minimum(const Lanes& one, const Lanes& other) {
    return Lanes::combined(one, other, [](Lanes::Part left, Lanes::Part right) TANDEM_INLINE_LAMBDA {
#if TANDEM_AVX2
        return (Lanes::Part)_mm256_min_ps(left, right);
#else
        return left < right ? left : right;
#endif
    });
}

// Sixteen small integers as floats: 8 bits with sign, and the lowest 4 bits of each lane.
TANDEM_INLINE Lanes load_int8(const std::int8_t* from) {
#if TANDEM_AVX2
    Lanes lanes;
    Lanes::each_part([&](int part) TANDEM_INLINE_LAMBDA {
        const __m128i values = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + part * part_lanes));
        lanes.parts[part] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(values));
    });
    return lanes;
#else
    return converted<Lanes>(load(from), [](InParts<std::int8_t>::Part part) TANDEM_INLINE_LAMBDA {
        return __builtin_convertvector(part, Lanes::Part);
    });
#endif
}
TANDEM_INLINE Lanes low_4_bits(const LaneBits& lanes) {
    return converted<Lanes>(lanes & 15u, [](LaneBits::Part part) TANDEM_INLINE_LAMBDA {
        return __builtin_convertvector((InParts<std::int32_t>::Part)part, Lanes::Part);
    });
}

// Sixteen finite float16 values.
TANDEM_INLINE Lanes load_float16(const std::uint16_t* from) {
#if TANDEM_AVX2
    return converted<Lanes>(load(from), [](LaneHalves::Part part) TANDEM_INLINE_LAMBDA {
        return (Lanes::Part)_mm256_cvtph_ps((__m128i)part);
    });
#else
    const LaneBits bits = widen_bits(load(from));
    // Exponent and fraction moved into place count 2^112 too little: the multiplication is exact, subnormals included.
    const Lanes magnitude = as_floats((bits & 0x7fffu) << 13) * 0x1p112f;
    return as_floats(as_bits(magnitude) | (bits & 0x8000u) << 16);
#endif
}

// Keep the first `count` lanes and put `other` into the rest.
TANDEM_INLINE Lanes keep_first(const Lanes& lanes, int count, float other) {
    alignas(64) float values[num_lanes];
    store(values, lanes);
    for (int lane = count; lane < num_lanes; ++lane) values[lane] = other;
    return load(values);
}

}  // namespace tandem
