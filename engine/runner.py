"""The seam between scheduling and arithmetic: everything above it is plain Python, everything below is tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from core.blocks import KvGeometry
from core.errors import InvariantBroken
from engine.step import Answer, StepPlan


class ModelRunner(Protocol):
    """Computes steps over one paged KV pool. Not thread-safe: one step at a time."""

    geometry: KvGeometry
    max_context_tokens: int
    vocab_size: int
    numeric_class: str  # part of the cache identity: kernel path, CPU or GPU kind
    kv_layout: str  # part of the cache identity: what lies where in a block

    @property
    def kv_pools(self) -> tuple[torch.Tensor, ...]:
        """One for each rank (engine/parallel/), [num_blocks, num_layers, 2, ...], contiguous: a block is one run of
        bytes in each, together `geometry.block_bytes`."""
        ...

    def run(self, plan: StepPlan) -> Sequence[tuple[Answer, ...]]:
        """Copy blocks, write the KV of every slice into its own, and draw and score what each slice asks for.

        Returns: for each slice, in order, the answers to its `samples` (engine.sampler.draw).
        Raises: InvariantBroken: a block table does not cover its slice, or a block id lies outside the pool.
        """
        ...


def copy_blocks(kv_pool: torch.Tensor, copies: Sequence[tuple[int, int]]) -> None:
    """Do a plan's copies; `kv_pool` is [num_blocks, ...]. Raises InvariantBroken: a block lies outside the pool."""
    for source, target in copies:
        if not (0 <= source < len(kv_pool) and 0 <= target < len(kv_pool)):
            raise InvariantBroken(f"copy of block {source} to {target} in a pool of {len(kv_pool)}")
        kv_pool[target].copy_(kv_pool[source])
