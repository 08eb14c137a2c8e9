"""Paged attention by the flash-attn library: version 4 with any block size, version 2 with blocks of 256 tokens.

We install neither, and neither has been run by us: written after the sources of flash-attn-4 4.0.0b36
(flash_attn/cute/interface.py) and flash-attn 2.8.3 (flash_attn/flash_attn_interface.py). Both take strided views of the
pool, which is bfloat16, as long as rows are aligned to 16 bytes: head_dim is a multiple of 8.
"""

from __future__ import annotations

import torch

from engine.attention.backend import DeviceBatch
from engine.attention.paged import PagedAttention


def flash4_attention(pool: torch.Tensor) -> PagedAttention:
    """flash-attn 4, in one split: sums in an order that the batch does not change."""
    from flash_attn.cute import flash_attn_varlen_func

    def attend(batch: DeviceBatch, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = flash_attn_varlen_func(
            queries.to(pool.dtype),
            keys,
            values,
            cu_seqlens_q=batch.query_starts,
            seqused_k=batch.context_lens,
            max_seqlen_q=batch.most_queries,
            max_seqlen_k=batch.most_context,
            page_table=batch.block_tables,
            causal=True,
            num_splits=1,
        )[0]
        return output.float()

    return PagedAttention("flash4", pool, attend)


def flash2_attention(pool: torch.Tensor, exact: bool) -> PagedAttention:
    """flash-attn 2. exact: decodes are not split, which a heuristic would do by what else is in the batch."""
    from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

    def decode(batch: DeviceBatch, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = flash_attn_with_kvcache(
            queries.unsqueeze(1),
            keys,
            values,
            cache_seqlens=batch.context_lens,
            block_table=batch.block_tables,
            causal=True,
            num_splits=1 if exact else 0,
        )
        return output.squeeze(1)

    def prefill(batch: DeviceBatch, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = flash_attn_varlen_func(
            queries,
            keys,
            values,
            cu_seqlens_q=batch.query_starts,
            cu_seqlens_k=torch.nn.functional.pad(batch.context_lens.cumsum(0, dtype=torch.int32), (1, 0)),
            max_seqlen_q=batch.most_queries,
            max_seqlen_k=batch.most_context,
            causal=True,
            block_table=batch.block_tables,
        )
        return output

    def attend(batch: DeviceBatch, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        kernel = decode if batch.most_queries == 1 else prefill
        return kernel(batch, queries.to(pool.dtype), keys, values).float()

    return PagedAttention("flash2", pool, attend)
