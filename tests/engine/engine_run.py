"""One scheduler over a real runner, stepped by hand: what a worker's engine loop does, without its thread."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Collection, Iterable

from core.identity import Adapter
from core.request import FinishReason, GenerateRequest, PromptLogprobs, TokenDelta, TokenLogprobs
from engine.block_pool import BlockPool
from engine.cache_tiers import CacheTiers
from engine.runner import ModelRunner
from engine.scheduler import Scheduler
from engine.scheduler_config import SchedulerConfig
from engine.sequence import MatcherFactory, ModelLimits, no_grammars

EOS = 2  # of the default model
TAKING, GIVING = 0.1, 0.2  # chances at each step


class EngineRun:
    """The pool, and so the prefix cache, lives as long as the run; every batch of requests gets a new scheduler."""

    def __init__(
        self,
        runner: ModelRunner,
        make_matcher: MatcherFactory = no_grammars,
        adapters: Collection[Adapter] = (),
        tiers: CacheTiers | None = None,
    ) -> None:
        self._runner = runner
        self._adapters = adapters
        self._make_matcher = make_matcher
        self._limits = ModelLimits(runner.geometry.block_size, runner.max_context_tokens, (EOS,))
        self.pool = BlockPool(len(runner.kv_pools[0]), tiers)
        self.num_preemptions = 0
        self.cached_tokens: dict[str, int] = {}
        self._given: dict[str, int] = {}  # how much of each request's output was out before
        self.prompt_logprobs: dict[str, PromptLogprobs] = {}
        self.logprobs: dict[str, list[TokenLogprobs]] = defaultdict(list)
        self.failures: dict[str, str] = {}  # and their messages

    def generate(
        self, requests: Iterable[GenerateRequest], config: SchedulerConfig, disturb: random.Random | None = None
    ) -> dict[str, list[int]]:
        """Output tokens by request id, and by "id/1" for choice 1 and on.

        disturb: draws the steps at which all free blocks are taken away for a while, so that somebody is preempted.
        """
        scheduler = Scheduler(
            config, self.pool, self._limits, b"d" * 32, _no_stop_strings, self._make_matcher, self._adapters
        )
        for request in requests:
            self._given[request.request_id] = len(request.output_token_ids)
            scheduler.add(scheduler.new_sequence(request))
        outputs: dict[str, list[int]] = defaultdict(list)
        taken: list[int] = []
        while True:
            if disturb is not None:
                taken = self._take_or_give_room(taken, disturb)
            plan = scheduler.plan()
            if plan is not None:
                for item in scheduler.commit(plan, self._runner.run(plan)):
                    for delta in item.deltas:
                        self._take(delta, outputs)
            elif taken:
                self.pool.release(taken)
                taken = []
            else:
                break
        self.num_preemptions += scheduler.num_preemptions
        assert self.pool.num_used == 0
        return dict(outputs)

    def _take_or_give_room(self, taken: list[int], disturb: random.Random) -> list[int]:
        """Now and then take all free blocks, or give them back. Returns: those that are taken."""
        if not taken:
            return (self.pool.allocate(self.pool.num_free) or []) if disturb.random() < TAKING else []
        if disturb.random() < GIVING:
            self.pool.release(taken)
            return []
        return taken

    def _take(self, delta: TokenDelta, outputs: dict[str, list[int]]) -> None:
        name = f"{delta.request_id}/{delta.choice}" if delta.choice else delta.request_id
        assert delta.position == self._given[delta.request_id] + len(outputs[name])
        outputs[name] += delta.token_ids
        if delta.prompt_logprobs is not None:
            assert delta.request_id not in self.prompt_logprobs
            self.prompt_logprobs[delta.request_id] = delta.prompt_logprobs
        self.logprobs[name] += delta.logprobs
        if delta.usage is not None:
            self.cached_tokens[delta.request_id] = delta.usage.cached_tokens
        if delta.finish_reason is FinishReason.ERROR:
            self.failures[name] = delta.message
        else:
            assert delta.finish_reason in (None, FinishReason.STOP, FinishReason.LENGTH)


def _no_stop_strings(request: GenerateRequest) -> None:
    raise AssertionError(f"{request.request_id} has stop strings")
