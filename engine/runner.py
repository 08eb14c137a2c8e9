"""The seam between scheduling and arithmetic: everything above it is plain Python, everything below is tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from core.blocks import KvGeometry
from engine.step import Drawn, StepPlan


class ModelRunner(Protocol):
    """Computes steps over one paged KV pool. Not thread-safe: one step at a time."""

    geometry: KvGeometry
    max_context_tokens: int
    vocab_size: int
    numeric_class: str  # part of the cache identity: kernel path, CPU or GPU kind
    kv_layout: str  # part of the cache identity: what lies where in a block

    @property
    def kv_pool(self) -> torch.Tensor:
        """[num_blocks, num_layers, 2, num_kv_heads, ...], contiguous: a block is one run of `geometry.block_bytes`."""
        ...

    def run(self, plan: StepPlan) -> Sequence[Drawn | None]:
        """Write the KV of every slice into its blocks and draw one token for each slice that asks for one.

        Returns: for each slice, in order, what was drawn (engine.sampler.draw), or None where `sample` is None.
        Raises: InvariantBroken: a block table does not cover its slice, or a block id lies outside the pool.
        """
        ...
