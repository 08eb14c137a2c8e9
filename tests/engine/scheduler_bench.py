"""One scheduler over a runner that checks every read, stepped by hand."""

from __future__ import annotations

from collections import defaultdict

from core.request import FinishReason, GenerateRequest, SamplingParams, StopConditions
from engine.block_pool import BlockPool
from engine.scheduler import Scheduler
from engine.scheduler_config import SchedulerConfig
from engine.sequence import ModelLimits, no_grammars
from engine.step import Progress
from tests.engine.token_memory import TokenMemory
from tests.engine.token_tiers import TokenTiers

BLOCK_SIZE = 4


class Bench:
    """One scheduler with its runner, stepped by hand."""

    def __init__(
        self,
        num_blocks=64,
        token_budget=16,
        max_sequences=64,
        eos=(),
        context=512,
        block_size=BLOCK_SIZE,
        make_matcher=no_grammars,
        make_watch=lambda _request: NeverStops(),
        tiers: TokenTiers | None = None,
        **more,
    ):
        self.pool = BlockPool(num_blocks, tiers.decisions if tiers else None)
        limits = ModelLimits(block_size, context, tuple(eos))
        config = SchedulerConfig(token_budget, max_sequences, **more)
        self.scheduler = Scheduler(config, self.pool, limits, b"d" * 32, make_watch, make_matcher)
        self.memory = TokenMemory(self.pool, block_size)
        self.tiers = tiers
        if tiers is not None:
            tiers.memory = self.memory
        self.outputs: defaultdict[str, list[int]] = defaultdict(list)  # by request, and "request/1" for choice 1 and on
        self.planned: list[str] = []  # who was in the latest step
        self.finished: dict[str, FinishReason] = {}

    def add(self, request: GenerateRequest, **how) -> None:
        self.scheduler.add(self.scheduler.new_sequence(request, **how))

    def step(self) -> list[Progress]:
        self.planned = []
        plan = self.scheduler.plan()
        if plan is None:
            return []
        assert plan.num_tokens <= self.scheduler.config.token_budget
        self.planned = [item.request_id for item in plan.slices]
        return self.take(self.scheduler.commit(plan, self.memory.run(plan)))

    def take(self, progress: list[Progress]) -> list[Progress]:
        for item in progress:
            for delta in item.deltas:
                name = f"{item.request_id}/{delta.choice}" if delta.choice else item.request_id
                assert delta.position == len(self.outputs[name])
                self.outputs[name] += delta.token_ids
                if delta.finish_reason is not None:
                    assert name not in self.finished
                    self.finished[name] = delta.finish_reason
        self.pool.check()
        return progress

    def run(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if not self.step() and not (self.tiers and self.tiers.io()):
                return
        raise AssertionError("the scheduler did not come to an end")

    def assert_empty(self) -> None:
        load = self.scheduler.load()
        assert (load.waiting_requests, load.running_requests, load.waiting_tokens) == (0, 0, 0)
        assert self.pool.num_used == 0


class NeverStops:
    def push(self, token_id: int) -> str | None:
        return None


def request(name: str, prompt, max_tokens: int = 8, salt: str = "", priority: int = 0, **stop) -> GenerateRequest:
    """A greedy request."""
    conditions = StopConditions(max_tokens=max_tokens, **stop)
    return GenerateRequest(name, tuple(prompt), SamplingParams(0.0), conditions, cache_salt=salt, priority=priority)
