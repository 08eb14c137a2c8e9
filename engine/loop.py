"""Runs one engine step after another: plan here, compute in a thread, commit here.

The scheduler and the block pool are touched only from the event loop, so nothing needs a lock; while a step
computes, the loop goes on taking requests, notices and cancellations.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from engine.runner import ModelRunner
from engine.scheduler import Scheduler
from engine.step import Answer, Progress, StepPlan


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step computed, and how long it took in its thread."""

    duration_s: float
    prefill_tokens: int
    decode_tokens: int


class EngineLoop:
    """Owns the step thread. `on_step` is called in the event loop after each commit, with what progressed;
    `before_step` is waited for before each step is computed."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        on_step: Callable[[list[Progress], StepReport], None],
        before_step: Callable[[StepPlan], Awaitable[None]] | None = None,
        cpu_core: int | None = None,
    ) -> None:
        """cpu_core: that the step thread stays on; None: any."""
        self._scheduler = scheduler
        self._runner = runner
        self._on_step = on_step
        self._before_step = before_step
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="engine-step", initializer=_stay_on, initargs=(cpu_core,)
        )
        self._task: asyncio.Task[None] | None = None

    def start(self) -> asyncio.Task[None]:
        """Begin stepping. The task ends only by `stop` or by an error, which is then its result."""
        self._task = asyncio.get_running_loop().create_task(self._run())
        return self._task

    def wake(self) -> None:
        """There may be something to plan."""
        self._wake.set()

    async def stop(self) -> None:
        """End after the step in flight. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await asyncio.to_thread(self._thread.shutdown)  # ends with the step in flight

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._wake.clear()
            plan = self._scheduler.plan()
            if plan is None:
                await self._wake.wait()
                continue
            if self._before_step is not None:
                await self._before_step(plan)
            drawn, duration_s = await loop.run_in_executor(self._thread, self._compute, plan)
            report = StepReport(duration_s, plan.num_tokens - plan.num_decodes, plan.num_decodes)
            self._on_step(self._scheduler.commit(plan, drawn, duration_s), report)

    def _compute(self, plan: StepPlan) -> tuple[Sequence[tuple[Answer, ...]], float]:
        start_s = time.perf_counter()
        return self._runner.run(plan), time.perf_counter() - start_s


def _stay_on(cpu_core: int | None) -> None:
    """Pin the calling thread alone: streams and transfers go on on other cores."""
    if cpu_core is not None:
        os.sched_setaffinity(0, {cpu_core})
