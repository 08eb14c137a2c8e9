"""A ModelRunner that computes with the ranks of its group: same plans, same tokens, a part of the weights each."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, Protocol

import torch

from core.errors import RankLost
from engine.models.decoder import Gather
from engine.parallel.group import Group
from engine.parallel.rank import ShardRunner
from engine.parallel.ranks import Ranks
from engine.parallel.shard import Shard, plan_for_ranks
from engine.runner import ModelRunner
from engine.step import Answer, StepPlan

START_TIMEOUT_S: Final = 600.0  # weights of every rank, and their graphs
STEP_TIMEOUT_S: Final = 60.0
SILENCE_TIMEOUT_S: Final = 10.0  # as a router's for a worker (router/config.py)


class LeadingRunner(ShardRunner, ModelRunner, Protocol):
    """Rank 0's: draws too."""

    def check(self, plan: StepPlan) -> None:
        """Raise InvariantBroken where the plan would touch what is not there: before other ranks are told of it."""
        ...

    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Of each sample, without drawing, [num_samples, vocab_size]."""
        ...


class ParallelRunner:
    """A ModelRunner over the pools of all ranks. Starting it takes seconds; `close` ends the ranks.

    Args:
        make: makes the runner of any shard; called here for rank 0 and, pickled, in the other ranks' processes.
        pools: the ranks' KV pools, on their devices, shaped as `make`'s runner wants them.
        on_lost: told once, from a thread, when a rank has ended or hangs: this runner is of no use any more, or never
            comes to be.
    Raises: RankLost: a rank did not start. What `make` raises.
    """

    def __init__(
        self,
        make: Callable[[Shard, torch.Tensor, Gather], LeadingRunner],
        pools: Sequence[torch.Tensor],
        on_lost: Callable[[RankLost], None],
        *,
        start_timeout_s: float = START_TIMEOUT_S,
        step_timeout_s: float = STEP_TIMEOUT_S,
        silence_timeout_s: float = SILENCE_TIMEOUT_S,
    ) -> None:
        # In memory, so that nothing is left on a disk however this ends. Never closed: torch opens the path again when
        # it destroys its store, whenever that is, and another file must not have the number then.
        meeting_file = f"/proc/{os.getpid()}/fd/{os.memfd_create('tandem-ranks')}"
        leader = Shard(0, len(pools))
        bounds = (start_timeout_s, step_timeout_s, silence_timeout_s)
        self._ranks = Ranks(make, pools, meeting_file, *bounds, on_lost)
        self._group: Group | None = None
        try:
            with self._ranks.starting():
                self._group = Group(leader, meeting_file, pools[0].device, start_timeout_s)
                self._runner = make(leader, pools[0], self._group.gather)
        except BaseException:
            self.close()
            raise
        self._pools = tuple(pools)
        part = self._runner.geometry
        self.geometry = replace(part, num_kv_heads=part.num_kv_heads * len(pools))
        self.max_context_tokens = self._runner.max_context_tokens
        self.vocab_size = self._runner.vocab_size
        self.numeric_class = self._runner.numeric_class
        self.kv_layout = self._runner.kv_layout

    @property
    def kv_pools(self) -> tuple[torch.Tensor, ...]:
        """See ModelRunner."""
        num_blocks = len(self._runner.kv_pools[0])
        return tuple(pool[:num_blocks] for pool in self._pools)

    def run(self, plan: StepPlan) -> Sequence[tuple[Answer, ...]]:
        """See ModelRunner. Raises: RankLost."""
        self._runner.check(plan)
        with self._ranks.step(plan_for_ranks(plan)):
            return self._runner.run(plan)

    def logits(self, plan: StepPlan) -> torch.Tensor:
        """See LeadingRunner. Raises: RankLost."""
        self._runner.check(plan)
        with self._ranks.step(plan_for_ranks(plan)):
            return self._runner.logits(plan)

    def close(self) -> None:
        """End the ranks. Nothing can be computed any more."""
        self._ranks.close()
        if self._group is not None:
            self._group.close()
