"""How long a request waits for copies of its cached blocks, which one step has no time for.

So it does for a bounded number of steps, after those of others who wait so; what is not copied by then is lost, or
computed.
"""

from __future__ import annotations

import math
from typing import Final

from core.identity import BlockHash
from engine.block_pool import BlockPool
from engine.sequence import Sequence

COPY_PATIENCE: Final = 2  # times the steps that copies take alone: decodes that need blocks copy as well


class CopyWait:
    """The waiting for copies between `pool` and its tiers."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._last_due_step = 0  # for which any of those who wait does so

    def waits(self, sequence: Sequence, hashes: list[BlockHash], num_blocks: int, keep_free: int, step: int) -> bool:
        """Whether `sequence` waits in `step`, as its blocks take more copies than that has left; begins those that it
        has."""
        if sequence.copies_due_step is not None and step >= sequence.copies_due_step:
            return False
        num_missing = self._pool.copy_ahead(hashes, num_blocks, keep_free)
        if num_missing and sequence.copies_due_step is None:
            num_steps = math.ceil(COPY_PATIENCE * num_missing / self._pool.tiers.copies_per_step)
            sequence.copies_due_step = self._last_due_step = max(self._last_due_step, step) + num_steps
        return num_missing > 0
