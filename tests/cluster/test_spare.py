"""A spare worker on a real Ray: what is taken is alive, and has imported its host already."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from itertools import count

from cluster.actors import WorkerActor
from cluster.ray_runtime import Actor, RayRuntime
from cluster.spare import SpareWorker

STUB = "stub_processes:StubWorkerProcess"
TIMEOUT_S = 30.0
NUMBERS = count()


def creating(runtime: RayRuntime, host: str, actors: list[Actor]) -> Callable[[], Actor]:
    def create() -> Actor:
        actors.append(runtime.create(WorkerActor, f"spare-{next(NUMBERS)}", host))
        return actors[-1]

    return create


async def pid_of(actor: Actor) -> int:
    return int(await actor.call("ping", timeout_s=TIMEOUT_S))


async def forgotten(spare: SpareWorker) -> None:
    """Until it is seen that the spare is no good."""
    async with asyncio.timeout(TIMEOUT_S):
        while spare.is_there:  # noqa: ASYNC110 - as a caller sees it
            await asyncio.sleep(0.02)


async def test_a_spare_is_taken_once(ray_runtime: RayRuntime) -> None:
    actors: list[Actor] = []
    spare = SpareWorker(creating(ray_runtime, STUB, actors), TIMEOUT_S, TIMEOUT_S)
    spare.refill()
    spare.refill()  # there is one
    assert len(actors) == 1
    taken, fresh = spare.take(), spare.take()
    assert [taken, fresh] == actors and await pid_of(taken) != await pid_of(fresh)
    spare.refill()
    assert len(actors) == 3 and spare.take() is actors[2]
    for actor in actors:
        actor.kill()


async def test_a_spare_that_hangs_is_not_given(ray_runtime: RayRuntime) -> None:
    """A stopped process: whoever got it would wait until its start is given up."""
    actors: list[Actor] = []
    spare = SpareWorker(creating(ray_runtime, STUB, actors), TIMEOUT_S, heartbeat_timeout_s=0.5)
    spare.refill()
    pid = await pid_of(actors[0])
    await actors[0].call("prepare", timeout_s=TIMEOUT_S)
    os.kill(pid, signal.SIGSTOP)
    await forgotten(spare)
    living = spare.take()
    assert living is actors[1] and await pid_of(living)
    living.kill()


async def test_a_spare_that_died_is_not_given(ray_runtime: RayRuntime) -> None:
    actors: list[Actor] = []
    spare = SpareWorker(creating(ray_runtime, STUB, actors), TIMEOUT_S, TIMEOUT_S)
    spare.refill()
    os.kill(await pid_of(actors[0]), signal.SIGKILL)
    await forgotten(spare)
    living = spare.take()
    assert living is actors[1] and await pid_of(living)
    living.kill()


async def test_a_spare_that_cannot_import_its_host_is_not_given(ray_runtime: RayRuntime) -> None:
    actors: list[Actor] = []
    spare = SpareWorker(creating(ray_runtime, "nowhere:Host", actors), TIMEOUT_S, TIMEOUT_S)
    spare.refill()
    await forgotten(spare)
    assert len(actors) == 1
