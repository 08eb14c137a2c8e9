// The kernels one by one, behind a plain C interface. Each function takes units of 4 bytes: float32, or bfloat16 pairs.
#include <vector>

#include "attention.h"
#include "matrix.h"
#include "rows.h"

using namespace tandem;

namespace {

// Units as the left side of a product has them in memory, and back.
template <class Unit>
std::vector<Factor<Unit>> to_factors(const void* units, long num_units) {
    std::vector<Factor<Unit>> factors(num_units * factors_per_unit<Unit>);
    if constexpr (factors_per_unit<Unit> == 1) {
        std::memcpy(factors.data(), units, num_units * sizeof(Unit));
    } else {
        const auto* pairs = static_cast<const Unit*>(units);
        for (std::size_t index = 0; index < factors.size(); ++index)
            factors[index] = value_of(pairs[index / factors_per_unit<Unit>], index % factors_per_unit<Unit>);
    }
    return factors;
}
template <class Unit>
void to_units(const std::vector<Factor<Unit>>& factors, void* units) {
    if constexpr (factors_per_unit<Unit> == 1) {
        std::memcpy(units, factors.data(), factors.size() * sizeof(Unit));
    } else {
        auto* halves = static_cast<std::uint16_t*>(units);
        for (std::size_t index = 0; index < factors.size(); ++index) {
            std::uint32_t bits;
            std::memcpy(&bits, &factors[index], sizeof bits);
            halves[index] = static_cast<std::uint16_t>(bits >> 16);
        }
    }
}

template <class Unit>
struct Kernels {
    // A packed matrix and the memory that it is unpacked in.
    struct Matrix {
        std::vector<Factor<Unit>> scratch;
        PackedMatrix<Unit> packed;

        Matrix(TandemMatrix stored, int num_outputs, int num_inputs)
            : scratch(static_cast<long>(tile_columns) * num_inputs),
              packed{stored, num_outputs, num_inputs, scratch.data()} {}

        long num_steps() const { return packed.floats().num_steps; }
        long left_stride() const { return num_steps() * factors_per_unit<Unit>; }
    };

    static void read_outputs(TandemMatrix stored, int num_outputs, int num_inputs, float* output) {
        const Matrix matrix(stored, num_outputs, num_inputs);
        for (int index = 0; index < num_outputs; ++index)
            matrix.packed.blocks().read_output(index, output + static_cast<long>(index) * num_inputs);
    }

    static void multiply_matrix(const void* left, int num_rows, TandemMatrix stored, int num_outputs, int num_inputs,
                                float* output, int adds) {
        const Matrix matrix(stored, num_outputs, num_inputs);
        const auto rows = to_factors<Unit>(left, num_rows * matrix.num_steps());
        const long stride = pad_columns(num_outputs);
        if (adds)
            multiply(rows.data(), matrix.left_stride(), num_rows, matrix.packed, AddSums{output, stride});
        else
            multiply(rows.data(), matrix.left_stride(), num_rows, matrix.packed, StoreSums{output, stride});
    }

    static void multiply_swiglu(const void* left, int num_rows, TandemMatrix stored, int num_outputs, int num_inputs,
                                void* output) {
        const Matrix matrix(stored, 2 * num_outputs, num_inputs);
        const auto rows = to_factors<Unit>(left, num_rows * matrix.num_steps());
        const long stride = pad_columns(num_outputs) / values_per_factor<Unit>;
        std::vector<Factor<Unit>> gated(num_rows * stride);
        multiply(rows.data(), matrix.left_stride(), num_rows, matrix.packed, StoreSwiglu<Unit>{gated.data(), stride});
        to_units<Unit>(gated, output);
    }

    static float soften_row(const float* scores, int num_visible, int num_pages, float scale, void* weights) {
        std::vector<Factor<Unit>> factors(num_pages * page_tokens / values_per_factor<Unit>);
        const float inverse = soften<Unit>(scores, num_visible, num_pages, scale, factors.data());
        to_units<Unit>(factors, weights);
        return inverse;
    }

    static void normalise_row(const float* row, const float* scale, int size, float epsilon, void* output) {
        std::vector<Factor<Unit>> factors(size / values_per_factor<Unit>);
        normalise<Unit>(row, scale, size, epsilon, factors.data());
        to_units<Unit>(factors, output);
    }

    // keys, values: [num_tokens, num_kv_heads, head_dim] units, put into the pool's blocks of layer 1 of 2.
    static void write_tokens(void* pool_units, int num_kv_heads, int head_dim, const std::int32_t* block_ids,
                             int num_tokens, const void* keys, const void* values) {
        const KvPool<Unit> pool{static_cast<Unit*>(pool_units), 2, num_kv_heads, head_dim};
        const int head_steps = pool.head_steps();
        for (int token = 0; token < num_tokens; ++token)
            for (int head = 0; head < num_kv_heads; ++head) {
                const long offset = (static_cast<long>(token) * num_kv_heads + head) * head_steps;
                const int block = block_ids[token / page_tokens], slot = token % page_tokens;
                write_key(pool.keys(block, 1, head), slot, static_cast<const Unit*>(keys) + offset, head_steps);
                write_value(pool.values(block, 1, head), slot, static_cast<const Unit*>(values) + offset, head_dim);
            }
    }

    // queries: [num_kv_heads, num_rows, group, head_dim] units of the context's last tokens.
    // outputs: [num_rows, num_kv_heads * group, head_dim] units.
    static void attend_last(void* pool_units, int num_kv_heads, int head_dim, const std::int32_t* block_ids,
                            int num_tokens, int num_rows, int group, const void* queries, void* outputs) {
        const KvPool<Unit> pool{static_cast<Unit*>(pool_units), 2, num_kv_heads, head_dim};
        const long stride = AttentionScratch::stride_for(num_tokens);
        std::vector<float> scores(max_bunch_rows * stride);
        std::vector<Lanes> sums(max_bunch_rows * head_dim / num_lanes);
        const AttentionScratch scratch{scores.data(), sums.data(), stride};
        const long row_units = static_cast<long>(num_kv_heads) * group * pool.head_steps();
        const auto rotated = to_factors<Unit>(queries, num_rows * row_units);
        std::vector<Factor<Unit>> attended(rotated.size());
        attend(pool, 1, Run{0, num_rows, num_tokens - num_rows, block_ids}, nullptr, group, rotated.data(), num_rows,
               scratch, attended.data(), row_units * factors_per_unit<Unit>);
        to_units<Unit>(attended, outputs);
    }
};

}  // namespace

extern "C" {

const char* under_test_instruction_set() { return instruction_set; }

void under_test_multiply(int is_bfloat16, const void* left, int num_rows, const void* packed, int storage,
                         int num_outputs, int num_inputs, float* output, int adds) {
    (is_bfloat16 ? Kernels<Pair>::multiply_matrix : Kernels<float>::multiply_matrix)(
        left, num_rows, {packed, static_cast<TandemStorage>(storage)}, num_outputs, num_inputs, output, adds);
}

void under_test_swiglu(int is_bfloat16, const void* left, int num_rows, const void* packed, int storage,
                       int num_outputs, int num_inputs, void* output) {
    (is_bfloat16 ? Kernels<Pair>::multiply_swiglu : Kernels<float>::multiply_swiglu)(
        left, num_rows, {packed, static_cast<TandemStorage>(storage)}, num_outputs, num_inputs, output);
}

void under_test_read_outputs(int is_bfloat16, const void* packed, int storage, int num_outputs, int num_inputs,
                             float* output) {
    (is_bfloat16 ? Kernels<Pair>::read_outputs : Kernels<float>::read_outputs)(
        {packed, static_cast<TandemStorage>(storage)}, num_outputs, num_inputs, output);
}

float under_test_soften(int is_bfloat16, const float* scores, int num_visible, int num_pages, float scale,
                        void* weights) {
    return (is_bfloat16 ? Kernels<Pair>::soften_row : Kernels<float>::soften_row)(scores, num_visible, num_pages, scale,
                                                                                  weights);
}

void under_test_write(int is_bfloat16, void* pool, int num_kv_heads, int head_dim, const std::int32_t* block_ids,
                      int num_tokens, const void* keys, const void* values) {
    (is_bfloat16 ? Kernels<Pair>::write_tokens : Kernels<float>::write_tokens)(pool, num_kv_heads, head_dim, block_ids,
                                                                               num_tokens, keys, values);
}

void under_test_attend(int is_bfloat16, void* pool, int num_kv_heads, int head_dim, const std::int32_t* block_ids,
                       int num_tokens, int num_rows, int group, const void* queries, void* outputs) {
    (is_bfloat16 ? Kernels<Pair>::attend_last : Kernels<float>::attend_last)(
        pool, num_kv_heads, head_dim, block_ids, num_tokens, num_rows, group, queries, outputs);
}

void under_test_normalise(int is_bfloat16, const float* row, const float* scale, int size, float epsilon,
                          void* output) {
    (is_bfloat16 ? Kernels<Pair>::normalise_row : Kernels<float>::normalise_row)(row, scale, size, epsilon, output);
}

void under_test_rotate(float* head, const float* cosine, const float* sine, int head_dim) {
    rotate(head, cosine, sine, head_dim);
}

int under_test_greedy_choice(const float* logits, int size) { return greedy_choice(logits, size); }

void under_test_exponential(const float* from, float* to, int size) {
    for (int index = 0; index < size; index += num_lanes) store(to + index, exponential(load(from + index)));
}
}
