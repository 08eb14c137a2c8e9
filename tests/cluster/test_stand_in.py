"""Workers that stand in, as the controller performs it: what they are told, and what deaths in one turn come to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from cluster.config import ClusterConfig
from cluster.controller import Controller
from cluster.fleet import Fleet
from cluster.fleet_events import StartWorker
from cluster.ray_runtime import ActorFailed
from core.membership import Life, Role

WANTED = {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE}


class FakeActor:
    """switches: (role, stands_in) that it was told. may_start: set, unless it is to wait."""

    def __init__(self) -> None:
        self.dead = asyncio.get_running_loop().create_future()
        self.switches: list[tuple[object, object]] = []
        self.may_start = asyncio.Event()

    async def call(self, method: str, *arguments: object, timeout_s: float | None) -> object:
        if method == "watch":
            await asyncio.shield(self.dead)
        if method == "start":
            await self.may_start.wait()
        if self.dead.done():
            raise ActorFailed("killed")
        if method == "switch_role":
            role, stands_in, _timeout_s, _finish_s = arguments
            self.switches.append((role, stands_in))
        return "" if method in ("switch_role", "drain") else object()

    def kill(self) -> None:
        if not self.dead.done():
            self.dead.set_result(None)


class Cluster:
    """Two workers that are ready. starts_at_once: so are those that replace them."""

    def __init__(self, folder: Path, *, stand_in: bool) -> None:
        self.actors: dict[str, FakeActor] = {}
        self.starts_at_once = True
        config = ClusterConfig(folder, drain_timeout_s=1.0, drain_finish_s=0.5)
        fleet = Fleet(WANTED, Random(1), stand_in=stand_in)
        self.controller = Controller(fleet, self._spawn, config, lambda _event: None, nothing, nothing)
        self.running: asyncio.Task[None] | None = None

    def _spawn(self, order: StartWorker) -> Any:
        actor = self.actors[order.ref.worker_id] = FakeActor()
        if self.starts_at_once:
            actor.may_start.set()
        return actor, None

    async def until(self, done: Callable[[], bool]) -> None:
        assert self.running is not None
        async with asyncio.timeout(5.0):
            while not done() and not self.running.done():  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert not self.running.done()


async def nothing(*_: object) -> None: ...


@asynccontextmanager
async def cluster_of(folder: Path, *, stand_in: bool) -> AsyncIterator[Cluster]:
    cluster = Cluster(folder, stand_in=stand_in)
    cluster.running = asyncio.create_task(cluster.controller.run())
    await cluster.until(lambda: cluster.controller.all_ready)
    yield cluster
    cluster.running.cancel()
    await asyncio.wait([cluster.running])


@pytest.mark.parametrize("stand_in", [False, True])
async def test_a_stand_in_that_dies_with_the_one_it_stands_in_for_ends_no_controller(
    tmp_path: Path, stand_in: bool
) -> None:
    async with cluster_of(tmp_path, stand_in=stand_in) as cluster:
        first = dict(cluster.actors)
        for name in ("decode-0", "prefill-0"):
            first[name].kill()
        await cluster.until(lambda: all(cluster.actors[name] is not first[name] for name in first))
        await cluster.until(lambda: cluster.controller.all_ready)


async def test_a_worker_knows_that_it_stands_in_until_it_goes_back_or_an_operator_wants_it_to_stay(
    tmp_path: Path,
) -> None:
    async with cluster_of(tmp_path, stand_in=True) as cluster:
        prefill = cluster.actors["prefill-0"]
        for _ in range(2):
            cluster.starts_at_once = False
            cluster.actors["decode-0"].kill()
            await cluster.until(lambda: prefill.switches[-1:] == [(Role.DECODE, True)])
            await cluster.until(lambda: cluster.controller.lives["prefill-0"] is Life.READY)
            if len(prefill.switches) == 1:
                cluster.actors["decode-0"].may_start.set()
                await cluster.until(lambda: prefill.switches[-1:] == [(Role.PREFILL, False)])
                await cluster.until(lambda: cluster.controller.all_ready)
        assert await cluster.controller.drain("prefill-0", Role.DECODE, force=False, timeout_s=1.0)
        assert prefill.switches[-1] == (Role.DECODE, False)
        assert not await cluster.controller.drain("prefill-0", Role.DECODE, force=False, timeout_s=1.0)
