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

// Rows that are attended from together: those of one tile, of each KV head of a bunch.
constexpr int max_bunch_rows = 12;

// Pages of keys, and columns of values, that are taken side by side; and over how many pages values are. Where
// registers hold one column of a tile, it takes 8 pages to make a loop long enough: a prompt takes 0.96 of its time.
// Tiles of three rows are of decodes, which wait for memory: 1.02 (bench/results/2026-11-30-engine-avx2.md).
template <int Rows>
constexpr int attention_columns = holds_columns(Rows, tile_vectors) || Rows == 3 ? tile_vectors : 1;
template <int Rows>
constexpr int value_pages = attention_columns<Rows> == 1 ? 8 : tile_vectors;

// The pages of a bunch of KV heads of one sequence in one layer; none where `num_pages` is 0.
template <class Unit>
struct PagedHeads {
    const KvPool<Unit>* pool;
    const std::int32_t* block_ids;
    int layer, first_head, num_heads, num_pages;

    const Unit* keys(int page, int head) const { return pool->keys(block_ids[page], layer, first_head + head); }
    const Unit* values(int page, int head) const { return pool->values(block_ids[page], layer, first_head + head); }
};

// Memory that tiles reuse, rows `stride` floats apart, those of a bunch's first head first. The stride is no multiple
// of 4 KiB, whose rows would share sets of the first-level cache.
struct AttentionScratch {
    float* scores;  // [max_bunch_rows][stride]; then weights, as factors
    Lanes* sums;    // max_bunch_rows * head_dim / 16: tiles, head after head
    long stride;

    static long stride_for(int most_tokens) {
        constexpr int group = page_tokens * tile_vectors;  // scores are written for whole groups of pages
        const long padded = (most_tokens + group - 1) / group * group;
        return padded % 1024 == 0 ? padded + num_lanes : padded;
    }
};

// scores[head, row][token] = query . key, not scaled, for all tokens of all pages. Values are fetched meanwhile or,
// where `next` is null, the keys that follow.
//   queries: [Rows][head_dim] of each head, heads `head_stride` factors apart.
template <class Unit, int Rows>
void score_pages(const Factor<Unit>* queries, long head_stride, const PagedHeads<Unit>& heads,
                 const PagedHeads<Unit>* next, const AttentionScratch& scratch) {
    constexpr int Columns = attention_columns<Rows>;
    const int head_steps = heads.pool->head_steps(), last_page = heads.num_pages - 1;
    for (int first_page = 0; first_page < heads.num_pages; first_page += Columns)
        for (int head = 0; head < heads.num_heads; ++head) {
            const Unit *keys[Columns], *ahead[Columns];
            for (int column = 0; column < Columns; ++column) {
                // Past the last page the last one is scored again, into memory that nothing reads.
                const int page = std::min(first_page + column, last_page);
                keys[column] = heads.keys(page, head);
                ahead[column] = next ? heads.values(page, head) : heads.keys(std::min(page + Columns, last_page), head);
            }
            Tile<Rows, Columns> sums = {};
            accumulate(
                sums, queries + head * head_stride, head_steps * factors_per_unit<Unit>, keys, page_tokens, head_steps,
                [&](int step, int column) TANDEM_INLINE_LAMBDA { prefetch(ahead[column] + step * page_tokens); });
            float* scores = scratch.scores + head * Rows * scratch.stride + first_page * page_tokens;
            for (int row = 0; row < Rows; ++row)
                for (int column = 0; column < Columns; ++column)
                    store(scores + row * scratch.stride + column * page_tokens, sums[row][column]);
        }
}

// Weights exp((score - highest) * scale) of one row, rounded to factors, which may take the place of its scores; 0 from
// token `num_visible` on. Returns the inverse of their sum, which is that of the rounded weights.
template <class Unit>
float soften(const float* scores, int num_visible, int num_pages, float scale, Factor<Unit>* weights) {
    constexpr int page_factors = page_tokens / values_per_factor<Unit>;
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
        sum += store_factors<Unit>(weights + page * page_factors, weight);
    }
    return 1.0f / sum_of(sum);
}

// sums[row][column] += weighted values of one head's pages [first_page, last_page), of tokens below `num_tokens`, in
// dimensions [first_dim, + 16 * Columns). The keys of the same pages of `next` are fetched meanwhile or, where that is
// null, the values that follow: of the same pages in the next dimensions, after the last ones of the next pages.
//   weights: of the head's rows, `stride` factors apart.
template <class Unit, int Rows, int Columns>
void weigh_values(const Factor<Unit>* weights, long stride, const PagedHeads<Unit>& heads, const PagedHeads<Unit>* next,
                  int head, int first_page, int last_page, int num_tokens, int first_dim, Tile<Rows, Columns>& sums) {
    constexpr int step_values = values_per_unit<Unit>, page_steps = page_tokens / step_values;
    const int head_dim = heads.pool->head_dim;
    Tile<Rows, Columns> tile;
    copy_tile(sums, tile);
    for (int page = first_page; page < last_page; ++page) {
        const Unit* values = heads.values(page, head) + first_dim;
        const Unit* ahead = values;
        if (!next)
            ahead = first_dim + Columns * num_lanes < head_dim
                        ? values + Columns * num_lanes
                        : heads.values(std::min(page + value_pages<Rows>, heads.num_pages - 1), head);
        else if (page < next->num_pages && head < next->num_heads)
            ahead = next->keys(page, head) + first_dim;
        const Unit* right[Columns];
        for (int column = 0; column < Columns; ++column) right[column] = values + column * num_lanes;
        const int num_steps = std::min(page_steps, (num_tokens - page * page_tokens + step_values - 1) / step_values);
        accumulate(tile, weights + page * page_steps * factors_per_unit<Unit>, stride, right, head_dim, num_steps,
                   [&](int step, int column) TANDEM_INLINE_LAMBDA {
                       prefetch(ahead + step * head_dim + column * num_lanes);
                   });
    }
    copy_tile(tile, sums);
}

// Attend from `Rows` rows of each head of a bunch.
//   queries: [Rows][head_dim] of each head, rotated, not scaled, heads `head_stride` factors apart.
//   num_visible: tokens that each row sees, itself included.
//   outputs: of the first head, one row of head_dim each; those of the next lie `output_stride` factors further on.
//   next: what is attended to next; null: the same pages, by another tile.
// Scattered pages are not a stream that the processor would fetch ahead by itself. So one line is asked for with each
// that is used: what is asked for faster than memory gives it is dropped. And the heads of a page, which lie together,
// are taken after one another and four pages in turn: four streams come faster than one
// (bench/results/2026-11-30-engine.md). Tiles that read pages again ask for what they read next themselves: at a
// context of 2,000 it has left the second-level cache since the last tile, and attention takes 0.88 of its time
// (2026-11-30-engine-avx2.md).
template <class Unit, int Rows>
void attend_tile(const Factor<Unit>* queries, long head_stride, const PagedHeads<Unit>& heads,
                 const PagedHeads<Unit>* next, const int (&num_visible)[Rows], const AttentionScratch& scratch,
                 Factor<Unit>* const (&outputs)[Rows], long output_stride) {
    const int head_dim = heads.pool->head_dim, num_vectors = head_dim / num_lanes;
    const float scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
    score_pages<Unit, Rows>(queries, head_stride, heads, next, scratch);
    auto* weights = reinterpret_cast<Factor<Unit>*>(scratch.scores);
    float inverse_sums[max_bunch_rows];
    for (int row = 0; row < heads.num_heads * Rows; ++row)
        inverse_sums[row] = soften<Unit>(scratch.scores + row * scratch.stride, num_visible[row % Rows],
                                         heads.num_pages, scale, weights + row * scratch.stride);
    const int num_tokens = *std::max_element(num_visible, num_visible + Rows);
    std::fill_n(scratch.sums, heads.num_heads * Rows * num_vectors, Lanes{});
    const auto visit_sums = [&](int head, auto&& visit) TANDEM_INLINE_LAMBDA {
        visit_parts<attention_columns<Rows>>(num_vectors, [&](auto columns, int first) {
            Lanes& sums = scratch.sums[(head * num_vectors + first) * Rows];
            visit(reinterpret_cast<Tile<Rows, decltype(columns)::value>&>(sums), first * num_lanes);
        });
    };
    for (int page = 0; page < heads.num_pages; page += value_pages<Rows>)
        for (int head = 0; head < heads.num_heads; ++head)
            visit_sums(head, [&](auto& sums, int first_dim) {
                weigh_values(weights + head * Rows * scratch.stride, scratch.stride, heads, next, head, page,
                             std::min(page + value_pages<Rows>, heads.num_pages), num_tokens, first_dim, sums);
            });
    for (int head = 0; head < heads.num_heads; ++head)
        visit_sums(head, [&](auto& sums, int first_dim) {
            for (int row = 0; row < Rows; ++row)
                for (const Lanes& sum : sums[row]) {
                    const long dim = first_dim + (&sum - sums[row]) * num_lanes;
                    store_factors<Unit>(outputs[row] + head * output_stride + dim / values_per_factor<Unit>,
                                        sum * inverse_sums[head * Rows + row]);
                }
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
void attend(const KvPool<Unit>& pool, int layer, const Run& run, const Run* next_run, int group,
            const Factor<Unit>* queries, int most_rows, const AttentionScratch& scratch, Factor<Unit>* outputs,
            long output_stride) {
    const int head_factors = pool.head_dim / values_per_factor<Unit>, num_rows = run.num_rows * group;
    const long head_stride = static_cast<long>(most_rows) * group * head_factors;
    // The tiles of many rows read all pages again, which had then better be few: one head's.
    const bool is_one_tile = num_rows <= max_tile_rows;
    const int bunch = is_one_tile ? std::min(max_bunch_rows / num_rows, pool.num_kv_heads) : 1;
    for (int first_head = 0; first_head < pool.num_kv_heads; first_head += bunch) {
        const int next_head = std::min(first_head + bunch, pool.num_kv_heads);
        PagedHeads<Unit> next{
            &pool, run.block_ids, layer, next_head, std::min(bunch, pool.num_kv_heads - next_head), run.num_pages()};
        if (next_head == pool.num_kv_heads) {
            next.num_pages = 0;
            if (next_run) next = {&pool, next_run->block_ids, layer, 0, bunch, next_run->num_pages()};
        }
        visit_parts<max_tile_rows>(num_rows, [&](auto rows, int first) {
            constexpr int Rows = decltype(rows)::value;
            int num_visible[Rows];
            Factor<Unit>* row_outputs[Rows];
            for (int row = 0; row < Rows; ++row) {
                const int token = (first + row) / group, head = first_head * group + (first + row) % group;
                num_visible[row] = run.first_position + token + 1;
                row_outputs[row] = outputs + (run.first_row + token) * output_stride + head * head_factors;
            }
            const PagedHeads<Unit> heads{&pool,      run.block_ids,          layer,
                                         first_head, next_head - first_head, pages_for(num_visible[Rows - 1])};
            attend_tile(queries + first_head * head_stride + (run.first_row * group + first) * head_factors,
                        head_stride, heads, is_one_tile ? &next : nullptr, num_visible, scratch, row_outputs,
                        group * head_factors);
        });
    }
}

}  // namespace tandem
