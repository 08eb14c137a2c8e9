"""Paged attention by our Triton kernel: any GPU, dtype, head size and block size that Triton compiles for."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from engine.attention.backend import DeviceBatch
from engine.attention.paged import PagedAttention
from engine.attention.paged_kernel import paged_attention

LEAST_TILE: Final = 16  # rows and columns of a `tl.dot`
PREFILL_TILE_ROWS: Final = 64
TILE_KEYS: Final = 64
OPERANDS: Final = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


def triton_attention(pool: torch.Tensor, num_heads: int, exact: bool) -> PagedAttention:
    """The kernel over a pool of float32 or bfloat16.

    Split-free, so that a row's result never depends on its batch. exact: nor on whether it is computed in a prefill
    or in a decode, for which decodes take prefill's tiles.
    """
    block_size, num_kv_heads, head_dim = pool.shape[3:]
    group = num_heads // num_kv_heads
    least_rows = max(LEAST_TILE, triton.next_power_of_2(group))
    prefill_rows = max(PREFILL_TILE_ROWS, least_rows)
    decode_rows = prefill_rows if exact else least_rows
    # Triton's interpreter, which runs the kernel on a CPU, has no products of bfloat16. There it takes float32 products
    # of the same values, which is what tensor cores compute.
    operand = OPERANDS[torch.float32 if pool.device.type == "cpu" else pool.dtype]

    def attend(batch: DeviceBatch, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        queries = queries.contiguous()
        output = torch.empty_like(queries)
        tile_rows = decode_rows if batch.most_queries == 1 else prefill_rows
        tile_queries = tile_rows // group
        num_tiles = -(-batch.most_queries // tile_queries)
        paged_attention[(len(batch.context_lens), num_tiles, num_kv_heads)](
            queries,
            output,
            keys,
            values,
            batch.block_tables,
            batch.query_starts,
            batch.context_lens,
            head_dim**-0.5,
            num_heads,
            batch.block_tables.stride(0),
            *keys.stride()[:3],
            GROUP=group,
            BLOCK_SIZE=block_size,
            HEAD_DIM=head_dim,
            PADDED_DIM=max(LEAST_TILE, triton.next_power_of_2(head_dim)),
            TILE_QUERIES=tile_queries,
            TILE_ROWS=tile_rows,
            TILE_KEYS=TILE_KEYS,
            OPERAND=operand,
        )
        return output

    return PagedAttention("triton", pool, attend)
