"""The seam between scheduling and arithmetic: everything above it is plain Python, everything below is tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from core.blocks import KvGeometry
from engine.step import NOT_FINITE, Answer, StepPlan


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

        What a slice wrote whose answers hold NOT_FINITE is zero afterwards: 0 x NaN would reach whoever has the blocks
        next, from behind its own tokens.

        Returns: for each slice, in order, the answers to its `samples` (engine.sampler.draw).
        Raises: InvariantBroken: the step would touch what is not there (engine/slice_check.py).
        """
        ...


def copy_blocks(kv_pool: torch.Tensor, copies: Sequence[tuple[int, int]]) -> None:
    """Do a checked plan's copies; `kv_pool` is [num_blocks, ...]."""
    for source, target in copies:
        kv_pool[target].copy_(kv_pool[source])


def clear_not_finite(
    kv_pool: torch.Tensor, block_size: int, plan: StepPlan, answers: Sequence[tuple[Answer, ...]]
) -> None:
    """Zero the blocks that slices with NOT_FINITE among their answers wrote into; `kv_pool` is [num_blocks, ...]."""
    for item, answer in zip(plan.slices, answers, strict=True):
        if NOT_FINITE in answer:
            kv_pool[list(item.block_table[item.start // block_size :])] = 0
