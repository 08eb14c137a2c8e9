"""Paged attention in Triton's language. Called by engine/attention/paged_triton.py only.

A row's result does not depend on its batch: it is one sum over its own context, in tiles of TILE_KEYS keys that start
at absolute positions, one after another and never split among programs. Keys that a row may not see have weight
exactly 0, so the tiles that only its neighbours need change nothing. What is left is the order of sums inside one
`tl.dot`, which the tile's shape fixes: equal TILE_ROWS, equal bits.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["table_stride"])  # else compiled anew for 1 and for multiples of 16
def paged_attention(
    queries,  # [num_tokens, num_heads, head_dim], contiguous; `output` too
    output,
    keys,  # one layer of the pool: [num_blocks, block_size, num_kv_heads, head_dim], strided; `values` too
    values,
    block_tables,  # [num_sequences, table_stride], int32
    query_starts,  # [num_sequences + 1], int32
    context_lens,  # [num_sequences], int32, the step's tokens included; 0: a padding row, whose output is 0
    scale,
    num_heads,
    table_stride,
    block_stride,
    slot_stride,
    head_stride,
    GROUP: tl.constexpr,  # query heads of one KV head
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,  # a power of two, at least 16
    TILE_QUERIES: tl.constexpr,
    TILE_ROWS: tl.constexpr,  # a power of two, at least 16 and TILE_QUERIES * GROUP
    TILE_KEYS: tl.constexpr,
    OPERAND: tl.constexpr,  # type of the products' operands, at least as wide as the pool's
):
    """One program: a tile of queries of one sequence, with the heads that share one KV head."""
    sequence, tile, kv_head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_token = tl.load(query_starts + sequence)
    num_queries = tl.load(query_starts + sequence + 1) - first_token
    first_query = tile * TILE_QUERIES
    if first_query >= num_queries:
        return
    first_position = tl.load(context_lens + sequence) - num_queries
    end = first_position + tl.minimum(first_query + TILE_QUERIES, num_queries)  # keys that the tile's last query sees

    rows = tl.arange(0, TILE_ROWS)
    dims = tl.arange(0, PADDED_DIM)
    row_queries = first_query + rows // GROUP
    positions = first_position + row_queries
    row_starts = ((first_token + row_queries).to(tl.int64) * num_heads + kv_head * GROUP + rows % GROUP) * HEAD_DIM
    row_valid = (rows < TILE_QUERIES * GROUP) & (row_queries < num_queries)
    row_mask = row_valid[:, None] & (dims < HEAD_DIM)[None, :]
    query = tl.load(queries + row_starts[:, None] + dims[None, :], mask=row_mask, other=0.0)
    query = query.to(keys.dtype.element_ty).to(OPERAND)

    highest = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    result = tl.zeros([TILE_ROWS, PADDED_DIM], tl.float32)
    for start in range(0, end, TILE_KEYS):
        key_positions = start + tl.arange(0, TILE_KEYS)
        key_valid = key_positions < end
        blocks = tl.load(block_tables + sequence * table_stride + key_positions // BLOCK_SIZE, mask=key_valid, other=0)
        slots = blocks.to(tl.int64) * block_stride + (key_positions % BLOCK_SIZE) * slot_stride + kv_head * head_stride
        key_mask = key_valid[:, None] & (dims < HEAD_DIM)[None, :]
        key = tl.load(keys + slots[:, None] + dims[None, :], mask=key_mask, other=0.0).to(OPERAND)
        value = tl.load(values + slots[:, None] + dims[None, :], mask=key_mask, other=0.0).to(OPERAND)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * (scale * LOG2_E)
        visible = key_valid[None, :] & (key_positions[None, :] <= positions[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))  # finite: every row sees the first key
        weights = tl.exp2(scores - new_highest[:, None])
        shrink = tl.exp2(highest - new_highest)
        total = total * shrink + tl.sum(weights, 1)
        result = result * shrink[:, None]
        result += tl.dot(weights.to(keys.dtype.element_ty).to(OPERAND), value, input_precision="ieee")
        highest = new_highest

    result = result / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(output + row_starts[:, None] + dims[None, :], result, mask=row_mask)
