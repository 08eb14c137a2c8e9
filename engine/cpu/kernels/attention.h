// Causal attention of a few query rows over the paged context of one sequence.
//
// Scores of the whole context, then softmax row by row, then weighted values: pages in the order of their positions,
// whatever blocks they lie in. What a row may not see has weight exactly 0, so it adds exact zeros.
// Sources: PagedAttention, arXiv:2309.06180; grouped heads, arXiv:2305.13245.
#pragma once

#include <algorithm>
#include <cmath>

#include "kv_pool.h"
#include "tile.h"

namespace tandem {

constexpr int pages_for(int num_tokens) { return (num_tokens + page_tokens - 1) / page_tokens; }

// One KV head's pages of one sequence in one layer; none where `num_pages` is 0.
template <class Unit>
struct PagedHead {
    const KvPool<Unit>* pool;
    const std::int32_t* block_ids;
    int layer, kv_head, num_pages;

    const Unit* keys(int page) const { return pool->keys(block_ids[page], layer, kv_head); }
    const Unit* values(int page) const { return pool->values(block_ids[page], layer, kv_head); }
};

// Memory that tiles reuse, rows `stride` floats apart. The stride is no multiple of 4 KiB, whose rows would share sets
// of the first-level cache.
struct AttentionScratch {
    float* scores;         // [max_tile_rows][stride]
    float* probabilities;  // [max_tile_rows][stride], in units of the dtype
    long stride;

    static long stride_for(int most_tokens) {
        constexpr int group = page_tokens * tile_vectors;  // scores are written for whole groups of pages
        const long padded = (most_tokens + group - 1) / group * group;
        return padded % 1024 == 0 ? padded + num_lanes : padded;
    }
};

// scores[row][token] = query . key, not scaled, for all tokens of all pages.
template <class Unit, int Rows>
void score_pages(const Unit* queries, int head_steps, const PagedHead<Unit>& head, const PagedHead<Unit>& next,
                 const AttentionScratch& scratch) {
    for (int first_page = 0; first_page < head.num_pages; first_page += tile_vectors) {
        const Unit* pages[tile_vectors];
        for (int column = 0; column < tile_vectors; ++column) {
            const int page = first_page + column;
            // Past the last page the last one is scored again, into memory that nothing reads.
            pages[column] = head.keys(std::min(page, head.num_pages - 1));
            if (page < next.num_pages) prefetch(next.keys(page), next.pool->page_bytes());
        }
        Tile<Rows, tile_vectors> sums = {};
        accumulate<Unit, Rows, tile_vectors>(sums, queries, head_steps, pages, page_tokens, head_steps);
        for (int row = 0; row < Rows; ++row)
            for (int column = 0; column < tile_vectors; ++column)
                store(scratch.scores + row * scratch.stride + (first_page + column) * page_tokens, sums[row][column]);
    }
}

// Weights exp((score - highest) * scale) of one row, rounded to units; 0 from token `num_visible` on.
// Returns the inverse of their sum, which is that of the rounded weights.
template <class Unit>
float soften(const float* scores, int num_visible, int num_pages, float scale, Unit* weights) {
    constexpr int step_units = page_tokens / values_per_unit<Unit>;
    const int full_pages = num_visible / page_tokens, rest = num_visible % page_tokens;
    Lanes highest = broadcast(-INFINITY);
    for (int page = 0; page < full_pages; ++page) highest = maximum(highest, load(scores + page * page_tokens));
    if (rest) highest = maximum(highest, keep_first(load(scores + full_pages * page_tokens), rest, -INFINITY));
    highest = broadcast(maximum_of(highest));

    Lanes sum = {};
    for (int page = 0; page < num_pages; ++page) {
        Lanes weight = {};
        if (page * page_tokens < num_visible) {
            weight = exponential((load(scores + page * page_tokens) - highest) * scale);
            if (page == full_pages) weight = keep_first(weight, rest, 0.0f);
        }
        sum += store_values(weights + page * step_units, weight);
    }
    return 1.0f / sum_of(sum);
}

// outputs[row][first_dim ...] = weighted mean of the values, 16 * Columns dimensions of it.
template <class Unit, int Rows, int Columns>
void weigh_values(const AttentionScratch& scratch, const PagedHead<Unit>& head, const PagedHead<Unit>& next,
                  int num_tokens, int first_dim, const float (&inverse_sums)[Rows], Unit* const (&outputs)[Rows]) {
    constexpr int step_values = values_per_unit<Unit>, page_steps = page_tokens / step_values;
    const auto* weights = reinterpret_cast<const Unit*>(scratch.probabilities);
    const int head_dim = head.pool->head_dim;
    Tile<Rows, Columns> sums = {};
    for (int page = 0; page < head.num_pages; ++page) {
        const Unit* values = head.values(page) + first_dim;
        if (first_dim == 0 && page < next.num_pages) prefetch(next.values(page), next.pool->page_bytes());
        const Unit* right[Columns];
        for (int column = 0; column < Columns; ++column) right[column] = values + column * num_lanes;
        const int num_steps = std::min(page_steps, (num_tokens - page * page_tokens + step_values - 1) / step_values);
        accumulate<Unit, Rows, Columns>(sums, weights + page * page_steps, scratch.stride, right, head_dim, num_steps);
    }
    for (int row = 0; row < Rows; ++row)
        for (int column = 0; column < Columns; ++column)
            store_values(outputs[row] + (first_dim + column * num_lanes) / step_values,
                         sums[row][column] * inverse_sums[row]);
}

// Attend from rows that share a KV head.
//   queries: [Rows][head_dim], rotated, not scaled.   num_visible: tokens that each row sees, itself included.
//   outputs: one row of head_dim each.
//   next: what is attended to next: fetched from memory meanwhile, as scattered pages are not a stream that the
//   processor would fetch ahead by itself.
template <class Unit, int Rows>
void attend_tile(const Unit* queries, const PagedHead<Unit>& head, const PagedHead<Unit>& next,
                 const int (&num_visible)[Rows], const AttentionScratch& scratch, Unit* const (&outputs)[Rows]) {
    const int head_dim = head.pool->head_dim;
    const float scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
    score_pages<Unit, Rows>(queries, head.pool->head_steps(), head, next, scratch);
    float inverse_sums[Rows];
    for (int row = 0; row < Rows; ++row)
        inverse_sums[row] = soften(scratch.scores + row * scratch.stride, num_visible[row], head.num_pages, scale,
                                   reinterpret_cast<Unit*>(scratch.probabilities) + row * scratch.stride);
    const int num_tokens = *std::max_element(num_visible, num_visible + Rows);
    visit_parts<tile_vectors>(head_dim / num_lanes, [&](auto columns, int first) {
        weigh_values<Unit, Rows, decltype(columns)::value>(scratch, head, next, num_tokens, first * num_lanes,
                                                           inverse_sums, outputs);
    });
}

// Tokens of one sequence, one after another, that are computed together.
struct Run {
    int first_row;       // in the block of rows
    int num_rows;        // tokens
    int first_position;  // in the sequence
    const std::int32_t* block_ids;
    int adapter = -1;  // that computes it; -1: none

    int num_pages() const { return pages_for(first_position + num_rows); }
};

// Attend from all heads of a run's tokens. Their keys and values are in the pool.
//   next_run: null after the last.   queries: [num_kv_heads][most_rows][group][head_dim].
//   outputs: rows of num_heads * head_dim, `output_stride` apart.
template <class Unit>
void attend(const KvPool<Unit>& pool, int layer, const Run& run, const Run* next_run, int group, const Unit* queries,
            int most_rows, const AttentionScratch& scratch, Unit* outputs, long output_stride) {
    const int head_steps = pool.head_steps();
    for (int kv_head = 0; kv_head < pool.num_kv_heads; ++kv_head) {
        const Unit* head_queries = queries + (static_cast<long>(kv_head) * most_rows + run.first_row) * group * head_steps;
        PagedHead<Unit> next{&pool, run.block_ids, layer, kv_head + 1, run.num_pages()};
        if (kv_head + 1 == pool.num_kv_heads)
            next = {&pool, next_run ? next_run->block_ids : nullptr, layer, 0, next_run ? next_run->num_pages() : 0};
        visit_parts<max_tile_rows>(run.num_rows * group, [&](auto rows, int first) {
            constexpr int Rows = decltype(rows)::value;
            int num_visible[Rows];
            Unit* row_outputs[Rows];
            for (int row = 0; row < Rows; ++row) {
                const int token = (first + row) / group, head = kv_head * group + (first + row) % group;
                num_visible[row] = run.first_position + token + 1;
                row_outputs[row] = outputs + (run.first_row + token) * output_stride + head * head_steps;
            }
            const PagedHead<Unit> pages{&pool, run.block_ids, layer, kv_head, pages_for(num_visible[Rows - 1])};
            attend_tile<Unit, Rows>(head_queries + first * head_steps, pages, next, num_visible, scratch, row_outputs);
            next.num_pages = 0;  // fetched by the first tile
        });
    }
}

}  // namespace tandem
