"""Attention over the GPU's pool that one can check by reading: what the kernels are tested against."""

from __future__ import annotations

import torch

from engine.attention.backend import DeviceBatch
from engine.attention.paged import PagedAttention


def reference_attention(pool: torch.Tensor, num_heads: int) -> PagedAttention:
    """In float64, one sequence after another."""
    group = num_heads // pool.shape[4]

    def attend(batch: DeviceBatch, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        output = torch.zeros_like(queries)
        starts = batch.query_starts.tolist()
        for index, context in enumerate(batch.context_lens.tolist()):
            rows = slice(starts[index], starts[index + 1])
            if context:
                table = batch.block_tables[index].long()
                seen = [half[table].flatten(0, 1)[:context].double() for half in (keys, values)]
                output[rows] = _attend_one(queries[rows].double(), *seen, group).to(queries.dtype)
        return output

    return PagedAttention("reference", pool, attend)


def _attend_one(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: int) -> torch.Tensor:
    """queries: [num_queries, num_heads, head_dim], the last of the context; keys, values: [context, kv heads, dim]."""
    keys, values = (half.repeat_interleave(group, dim=1) for half in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", queries, keys) * queries.shape[-1] ** -0.5
    num_queries, context = scores.shape[1:]
    positions = torch.arange(context - num_queries, context)
    weights = scores.masked_fill(torch.arange(context) > positions.unsqueeze(-1), float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values)
