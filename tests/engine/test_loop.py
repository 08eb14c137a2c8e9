"""The thread that computes steps."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import Any

import pytest

from engine.loop import EngineLoop


class OneStep:
    """A scheduler of one step, and the runner that says on which cores it computes."""

    def __init__(self) -> None:
        self.plans: list[Any] = [SimpleNamespace(num_tokens=1, num_decodes=1)]
        self.cores: set[int] = set()
        self.done = asyncio.Event()

    def plan(self) -> Any:
        return self.plans.pop() if self.plans else None

    def run(self, plan: Any) -> list[Any]:
        self.cores = os.sched_getaffinity(0)
        return []

    def commit(self, plan: Any, drawn: Any, duration_s: float) -> list[Any]:
        self.done.set()
        return []


@pytest.mark.parametrize("pinned", [True, False])
async def test_steps_are_computed_on_their_core_and_nothing_else_is(pinned: bool) -> None:
    before = os.sched_getaffinity(0)
    core, step = max(before), OneStep()
    loop: Any = EngineLoop(step, step, lambda progressed, report: None, None, core if pinned else None)  # type: ignore[arg-type]
    loop.start()
    async with asyncio.timeout(5):
        await step.done.wait()
    await loop.stop()
    assert step.cores == ({core} if pinned else before)
    assert os.sched_getaffinity(0) == before
