"""Workers that die in one turn of the controller's loop: what the first one's death asks of the second is of no use."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from cluster.config import ClusterConfig
from cluster.controller import Controller
from cluster.fleet import Fleet, StartWorker
from cluster.ray_runtime import ActorFailed
from core.membership import Role

WANTED = [("prefill-0", Role.PREFILL), ("decode-0", Role.DECODE)]


class FakeActor:
    def __init__(self) -> None:
        self.dead = asyncio.get_running_loop().create_future()

    async def call(self, method: str, *_arguments: object, timeout_s: float | None) -> object:
        if method == "watch":
            await asyncio.shield(self.dead)
        if self.dead.done():
            raise ActorFailed("killed")
        return "" if method in ("switch_role", "drain") else object()

    def kill(self) -> None:
        if not self.dead.done():
            self.dead.set_result(None)


async def until_ready(controller: Controller, actors: dict[str, FakeActor]) -> None:
    async with asyncio.timeout(5.0):
        while not (len(actors) == len(WANTED) and controller.all_ready):  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("stand_in", [False, True])
async def test_a_stand_in_that_dies_with_the_one_it_stands_in_for_ends_no_controller(
    tmp_path: Any, stand_in: bool
) -> None:
    actors: dict[str, FakeActor] = {}

    def spawn(order: StartWorker) -> Any:
        actors[order.ref.worker_id] = FakeActor()
        return actors[order.ref.worker_id], None

    async def nothing(*_: object) -> None: ...

    fleet = Fleet(WANTED, Random(1), stand_in=stand_in)
    config = ClusterConfig(tmp_path, drain_timeout_s=1.0, drain_finish_s=0.5)
    controller = Controller(fleet, spawn, config, lambda _event: None, nothing, nothing)  # type: ignore[arg-type]
    running = asyncio.create_task(controller.run())
    await until_ready(controller, actors)
    first = dict(actors)
    for name in ("decode-0", "prefill-0"):
        first[name].kill()
    async with asyncio.timeout(5.0):
        while any(actors[name] is first[name] for name in first) and not running.done():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert not running.done()
    await until_ready(controller, actors)
    running.cancel()
    await asyncio.wait([running])
