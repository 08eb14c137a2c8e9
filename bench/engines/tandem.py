"""Tandem in one process: the scheduler, the runner with its sampler, and nothing of the cluster."""

from __future__ import annotations

import time
from importlib.metadata import version
from pathlib import Path

from bench.engines.driver import Settings, serve
from core.blocks import num_blocks_for
from core.request import GenerateRequest, SamplingParams, StopConditions
from engine.block_pool import BlockPool
from engine.load_runner import load_runner
from engine.scheduler import Scheduler
from engine.scheduler_config import SchedulerConfig
from engine.sequence import ModelLimits, StopWatch

BLOCK_SIZE = 16


def no_stop_strings(_request: GenerateRequest) -> StopWatch:
    raise AssertionError("no request here has stop strings")


class TandemEngine:
    def __init__(self, settings: Settings) -> None:
        num_blocks = num_blocks_for(settings.kv_tokens, BLOCK_SIZE)
        self._runner = load_runner(Path(settings.model), settings.dtype, num_blocks, BLOCK_SIZE)
        limits = ModelLimits(BLOCK_SIZE, self._runner.max_context_tokens, ())
        config = SchedulerConfig(settings.token_budget or 256, max_decode_slowdown=settings.max_decode_slowdown)
        self._scheduler = Scheduler(config, BlockPool(num_blocks), limits, b"bench", no_stop_strings)
        self._sampling = SamplingParams(temperature=settings.temperature)
        self._request_ids: set[str] = set()
        self.version = f"{version('tandem')} ({self._runner.numeric_class})"

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        stop = StopConditions(max_tokens=max_tokens, ignore_eos=True)
        request = GenerateRequest(request_id, tuple(prompt), self._sampling, stop)
        self._scheduler.add(self._scheduler.new_sequence(request))
        self._request_ids.add(request_id)

    def step(self) -> list[str]:
        plan = self._scheduler.plan()
        assert plan is not None
        start_s = time.perf_counter()
        drawn = self._runner.run(plan)
        progress = self._scheduler.commit(plan, drawn, time.perf_counter() - start_s)
        return [item.request_id for item in progress if item.deltas]

    def clear(self) -> None:
        for request_id in self._request_ids:
            self._scheduler.cancel(request_id)
        self._request_ids.clear()


if __name__ == "__main__":
    serve(TandemEngine)
