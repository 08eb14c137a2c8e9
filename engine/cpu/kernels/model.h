// What Python hands over (engine/cpu/library.py mirrors these structs field by field).
#pragma once

#include <cstdint>

extern "C" {

// How a matrix's weights are stored: in the model's dtype, or as a GGUF's blocks (quantised.h).
enum TandemStorage : std::int32_t { tandem_floats, tandem_q4_0, tandem_q4_1, tandem_q8_0 };

struct TandemMatrix {
    const void* data;
    TandemStorage storage;
};

// Weights of one decoder layer. Matrices are packed (matrix.h); norms are [hidden_size] float32.
struct TandemLayer {
    const float* attention_norm;
    TandemMatrix qkv;  // query, key and value heads stacked
    TandemMatrix output;
    const float* feed_forward_norm;
    TandemMatrix gate_up;  // sixteen gate rows, sixteen up rows, and so on
    TandemMatrix down;
    const float* qkv_bias;    // of the stacked heads; null where the family has none
    const float* query_norm;  // [head_dim], one for all heads; null where the family has none
    const float* key_norm;    // same
};

// What an adapter adds to a projection: expand (shrink x), with any scale in `expand`. Both are packed floats.
struct TandemLowRank {
    TandemMatrix shrink;  // [rank, num_inputs]
    TandemMatrix expand;  // [num_outputs, rank]
    std::int32_t rank;    // 0: nothing is added
};

// An adapter's part of one layer, stacked as there.
struct TandemAdapterLayer {
    TandemLowRank qkv, output, gate_up, down;
};

// Sizes, weights and KV pool. hidden_size, intermediate_size and head_dim are multiples of 16.
struct TandemModel {
    std::int32_t is_bfloat16;  // of KV, matrix operands and weights stored as floats; else float32
    std::int32_t num_layers, hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, vocab_size;
    std::int32_t max_context_tokens;
    float rms_norm_eps;
    TandemMatrix embedding;  // [vocab_size, hidden_size]: floats row-major, blocks packed
    const float* cosines;    // [max_context_tokens, head_dim / 2]
    const float* sines;      // same
    const TandemLayer* layers;
    const float* final_norm;
    TandemMatrix head;  // packed
    void* kv_pool;
    std::int32_t num_adapters;
    const TandemAdapterLayer* adapter_layers;  // [num_adapters, num_layers]
};

// One step: `num_sequences` slices, whose tokens stand one after another. All ids are in range (Python checks).
struct TandemStep {
    std::int32_t num_sequences;
    const std::int32_t* token_ids;      // of all slices
    const std::int32_t* starts;         // position of each slice's first token
    const std::int32_t* lengths;        // tokens of each slice, at least 1
    const std::int32_t* table_offsets;  // where each slice's block table begins in block_ids
    const std::int32_t* block_ids;
    const std::int32_t* adapters;  // of each slice; -1: none
    std::int32_t num_logit_rows;
    std::int32_t only_probes;  // 1: no logits are wanted, only whether they would be finite: 0 or -1 in greedy_ids
    // Index in token_ids of each token whose next-token logits are wanted: never falling.
    const std::int32_t* logit_rows;
    float* logits;             // [num_logit_rows, vocab_size padded to 64]
    std::int32_t* greedy_ids;  // [num_logit_rows]; -1 where a logit is not finite
};
}
