// Decode attention of a batch over all layers, with a pool in which either the layers of a block lie together
// (block-major, ours) or the blocks of a layer do (layer-major). Only bfloat16.
#include <vector>

#include "attention.h"

using namespace tandem;

// block_ids: [batch, num_pages].   queries: [num_heads, head_dim], the same for all sequences.
extern "C" void bench_attend(void* pool_units, int is_block_major, int num_blocks, int num_layers, int num_kv_heads,
                             int head_dim, int group, const std::int32_t* block_ids, int batch, int num_pages,
                             const float* queries) {
    const long stride = AttentionScratch::stride_for(num_pages * page_tokens);
    std::vector<float> scores(max_bunch_rows * stride);
    std::vector<Lanes> sums(max_bunch_rows * head_dim / num_lanes);
    const AttentionScratch scratch{scores.data(), sums.data(), stride};
    std::vector<Factor<Pair>> rotated(num_kv_heads * group * head_dim / values_per_factor<Pair>), outputs(rotated);
    for (int first = 0; first < num_kv_heads * group * head_dim; first += num_lanes)
        store_factors<Pair>(rotated.data() + first / values_per_factor<Pair>, load(queries + first));
    std::vector<Run> runs;
    for (int sequence = 0; sequence < batch; ++sequence)
        runs.push_back({0, 1, num_pages * page_tokens - 1, block_ids + sequence * num_pages});
    for (int layer = 0; layer < num_layers; ++layer) {
        KvPool<Pair> pool{static_cast<Pair*>(pool_units), is_block_major ? num_layers : 1, num_kv_heads, head_dim};
        if (!is_block_major) pool.units += layer * static_cast<long>(num_blocks) * 2 * num_kv_heads * pool.page_units();
        for (int sequence = 0; sequence < batch; ++sequence)
            attend(pool, is_block_major ? layer : 0, runs[sequence],
                   sequence + 1 < batch ? &runs[sequence + 1] : nullptr, group, rotated.data(), 1, scratch,
                   outputs.data(), 0);
    }
}
