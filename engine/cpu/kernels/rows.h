// What is done to one row at a time: normalisation, rotary positions, the greedy choice.
#pragma once

#include <cmath>

#include "simd.h"

namespace tandem {

// row / sqrt(mean of squares + epsilon) * scale, rounded to factors. size: a multiple of 16.
// Source: RMSNorm, arXiv:1910.07467.
template <class Unit>
void normalise(const float* row, const float* scale, int size, float epsilon, Factor<Unit>* output) {
    Lanes squares = {};
    for (int index = 0; index < size; index += num_lanes) {
        const Lanes values = load(row + index);
        squares = multiply_add(values, values, squares);
    }
    const float inverse = 1.0f / std::sqrt(sum_of(squares) / static_cast<float>(size) + epsilon);
    for (int index = 0; index < size; index += num_lanes)
        store_factors<Unit>(output + index / values_per_factor<Unit>,
                            load(row + index) * inverse * load(scale + index));
}

// Rotate a head in place by its position's angles, whose cosines and sines are given, head_dim / 2 each.
// Source: RoPE, arXiv:2104.09864; value i turns with value i + head_dim / 2, as Hugging Face stores heads.
inline void rotate(float* head, const float* cosine, const float* sine, int head_dim) {
    const int half = head_dim / 2;
    float* __restrict first = head;
    float* __restrict second = head + half;
    for (int index = 0; index < half; ++index) {
        const float real = first[index], imaginary = second[index];
        first[index] = real * cosine[index] - imaginary * sine[index];
        second[index] = imaginary * cosine[index] + real * sine[index];
    }
}

// Index of the largest of `size` logits, the lowest among equals; -1 where one is not finite.
// The row must be readable up to the next multiple of 16.
inline int greedy_choice(const float* logits, int size) {
    Lanes best = broadcast(-INFINITY), differences = {};
    for (int index = 0; index < size; index += num_lanes) {
        Lanes values = load(logits + index);
        if (size - index < num_lanes) values = keep_first(values, size - index, logits[0]);
        best = maximum(best, values);
        differences += values - values;  // 0, or NaN where a value is not finite
    }
    if (!(sum_of(differences) == 0.0f)) return -1;
    const float highest = maximum_of(best);
    int index = 0;
    while (logits[index] != highest) ++index;
    return index;
}

}  // namespace tandem
