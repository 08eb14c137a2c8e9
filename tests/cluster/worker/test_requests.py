"""A worker's requests from command to token, with a runner that looks at what the routers know."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.worker.requests import Requests
from cluster.worker.router_streams import RouterStream, RouterStreams
from core.membership import Role
from core.messages import StartGeneration, StepOutput
from engine.step import Drawn, StepPlan
from kv_transfer.prefix_index import NoPrefixIndex
from telemetry.tasks import BackgroundTasks
from tests.engine.scheduler_bench import Bench, request


class Worker:
    """Of one router's. known: whose prompts are computed, as the router has read it when each step begins."""

    def __init__(self) -> None:
        self.bench = Bench(token_budget=8)
        self.streams = RouterStreams(self.bench.pool, self.bench.scheduler.holds)
        self.stream, _orphans = self.streams.open("router-0")
        self.read: set[str] = set()
        self.broken: list[BaseException] = []
        self.known: list[tuple[set[str], set[str]]] = []
        anything: Any = SimpleNamespace(
            scheduler=self.bench.scheduler, runner=self, pool=self.bench.pool, block_bytes=1, handoffs=(), driver=None,
            begin=lambda _command: None, stepped=lambda _progress: None, step_done=lambda *_figures: None,
        )  # fmt: skip
        spawn, index = BackgroundTasks(self.broken.append).spawn, NoPrefixIndex()
        self.requests = Requests(
            Role.DECODE, anything, anything, self.streams, anything, index, anything, anything, spawn, None
        )

    def run(self, plan: StepPlan) -> list[tuple[Drawn, ...]]:
        self.known.append((set(plan.prompts), set(self.read)))
        return self.bench.memory.run(plan)

    async def reads(self, stream: RouterStream) -> None:
        """As the servicer: a message is written some time after it is taken."""
        while (answer := await stream.outbox.get()) is not None:
            await asyncio.sleep(0)
            if isinstance(answer, StepOutput) and answer.computing is not None:
                self.read = set(answer.computing)
            stream.outbox.task_done()


@pytest.mark.parametrize("is_read", [True, False])
async def test_whose_prompts_a_step_computes_is_written_before_it_is_computed(is_read: bool) -> None:
    """But a router that reads nothing holds up nobody."""
    worker = Worker()
    reading = asyncio.create_task(worker.reads(worker.stream)) if is_read else None
    computing = worker.requests.loop.start()
    for name in ("a", "b"):
        worker.requests.command(worker.stream, StartGeneration(request(name, range(10), max_tokens=3)))
    async with asyncio.timeout(5):
        while worker.bench.scheduler.holds("a") or worker.bench.scheduler.holds("b"):
            assert not computing.done(), computing.result()
            await asyncio.sleep(0.001)
    await worker.requests.loop.stop()
    assert computing.cancelled() and not worker.broken
    if reading is not None:
        reading.cancel()
    in_steps = [prompts for prompts, _read in worker.known if prompts]
    assert {"a"} in in_steps and any("b" in prompts for prompts in in_steps)
    assert all(prompts <= read for prompts, read in worker.known) is is_read
