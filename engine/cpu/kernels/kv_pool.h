// Where the keys and values of a token lie in the paged pool.
//
// The pool is [block][layer][2: keys, values][kv_head][page]: a block is one run of bytes, so a hand-off moves it
// whole. A page holds 16 tokens of one head, in units of the dtype:
//   keys    [head_dim units][16 tokens]: one load takes the same unit of 16 tokens, so 16 scores grow side by side;
//   values  [16 tokens' units][head_dim]: a unit holds one dimension of one float32 token or of two bfloat16 tokens.
#pragma once

#include "simd.h"

namespace tandem {

constexpr int page_tokens = num_lanes;

template <class Unit>
struct KvPool {
    Unit* units;
    int num_layers, num_kv_heads, head_dim;

    static constexpr int token_steps = page_tokens / values_per_unit<Unit>;

    int head_steps() const { return head_dim / values_per_unit<Unit>; }
    long page_units() const { return static_cast<long>(token_steps) * head_dim; }
    long page_bytes() const { return page_units() * static_cast<long>(sizeof(Unit)); }

    Unit* keys(int block, int layer, int kv_head) const {
        return units + ((static_cast<long>(block) * num_layers + layer) * 2 * num_kv_heads + kv_head) * page_units();
    }
    Unit* values(int block, int layer, int kv_head) const {
        return keys(block, layer, kv_head) + num_kv_heads * page_units();
    }
};

// Put one token's key, head_dim values already rounded to units, into its slot of a page.
template <class Unit>
void write_key(Unit* page, int slot, const Unit* key, int head_steps) {
    for (int step = 0; step < head_steps; ++step) page[step * page_tokens + slot] = key[step];
}

// Put one token's value, head_dim values already rounded, into its slot of a page.
inline void write_value(float* page, int slot, const float* value, int head_dim) {
    std::memcpy(page + static_cast<long>(slot) * head_dim, value, head_dim * sizeof(float));
}
inline void write_value(Pair* page, int slot, const Pair* value, int head_dim) {
    Pair* units = page + static_cast<long>(slot / 2) * head_dim;
    for (int dim = 0; dim < head_dim; ++dim) {
        const Pair half = value[dim / 2] >> (dim % 2 * 16) & 0xffffu;
        // Tokens come in order. What lies in the place of the next one is stale, and is read with this one, times 0.
        units[dim] = slot % 2 ? (units[dim] & 0xffffu) | half << 16 : half;
    }
}

}  // namespace tandem
