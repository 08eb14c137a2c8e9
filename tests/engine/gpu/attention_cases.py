"""Pools and batches that attention kernels are tried on, here and on a GPU (bench/gpu/checks.py)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.attention.backend import DeviceBatch

NUM_BLOCKS = 24
NUM_LAYERS = 2
LAYER = 1
# (tokens of this step, tokens of the context with them); (1, 0) is a padding row.
DECODES = ((1, 1), (1, 64), (1, 65), (1, 0), (1, 130))
MIXED = ((1, 33), (5, 5), (40, 70), (1, 0), (70, 129))


@dataclass(frozen=True)
class Heads:
    num_heads: int
    num_kv_heads: int
    head_dim: int


HEADS = (Heads(6, 2, 24), Heads(4, 4, 64), Heads(8, 1, 16))


def filled_pool(heads: Heads, block_size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    shape = (NUM_BLOCKS, NUM_LAYERS, 2, block_size, heads.num_kv_heads, heads.head_dim)
    return torch.randn(shape, generator=generator).to(dtype)


def batch_of(lengths: tuple[tuple[int, int], ...], block_size: int) -> DeviceBatch:
    """Sequences over blocks that are theirs, scattered; nothing is written in these tests."""
    generator = torch.Generator().manual_seed(2)
    width = max(-(-context // block_size) for _, context in lengths) + 1
    ends = torch.tensor([tokens for tokens, _ in lengths]).cumsum(0)
    return DeviceBatch(
        slot_mapping=torch.zeros(int(ends[-1]), dtype=torch.int64),
        query_starts=torch.cat((torch.zeros(1, dtype=torch.int64), ends)).int(),
        context_lens=torch.tensor([context for _, context in lengths], dtype=torch.int32),
        block_tables=torch.randint(0, NUM_BLOCKS, (len(lengths), width), generator=generator, dtype=torch.int32),
        most_queries=max(tokens for tokens, _ in lengths),
        most_context=max(context for _, context in lengths),
    )


def random_queries(num_tokens: int, heads: Heads) -> torch.Tensor:
    return torch.randn(num_tokens, heads.num_heads, heads.head_dim, generator=torch.Generator().manual_seed(3))
