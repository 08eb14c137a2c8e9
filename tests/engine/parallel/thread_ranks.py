"""Ranks as threads of one process: every number that a group of processes computes, in milliseconds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from engine.models.decoder import Gather
from engine.parallel.shard import Shard
from engine.step import StepPlan

BOUND_S = 30.0


class ThreadRanks:
    """make: (shard, gather) to a rank's runner. `runners`: of all ranks."""

    def __init__(self, size: int, make: Callable[[Shard, Gather], Any]) -> None:
        self._barrier = threading.Barrier(size)
        self._parts: list[torch.Tensor] = [torch.empty(0)] * size
        self._threads = ThreadPoolExecutor(size)
        shards = [Shard(rank, size) for rank in range(size)]
        self.runners = list(self._threads.map(lambda shard: make(shard, self._gather_of(shard.rank)), shards))
        self.geometry = self.runners[0].geometry
        self.vocab_size = self.runners[0].vocab_size
        self.kv_pools = self.runners[0].kv_pools

    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Rank 0's; all must be the same."""
        first, *others = self._threads.map(lambda runner: runner.logits(plan), self.runners)
        assert all(torch.equal(first, other) for other in others)
        return first

    def _gather_of(self, rank: int) -> Gather:
        def gather(part: torch.Tensor) -> torch.Tensor:
            self._parts[rank] = part
            self._barrier.wait(BOUND_S)
            whole = torch.cat(self._parts, dim=1)
            self._barrier.wait(BOUND_S)
            return whole

        return gather
