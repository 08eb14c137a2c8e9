"""A worker on another host is dead when it was seen gone there, or when neither Ray nor any router hears of it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tandem.v1 import worker_pb2

from cluster import burial, processes
from cluster.burial import UNHEARD_S, HostBurial, Location
from cluster.processes import Process
from cluster.ray_runtime import ActorFailed, ActorHung
from core.errors import Unreachable
from core.membership import WorkerRef

REF = WorkerRef("decode-0", "9f3a")
NEXT = WorkerRef("decode-0", "77aa")  # its next life, which the router may know
ROUTERS = ("10.0.0.1:1", "10.0.0.2:1")
NOBODY = Location("host", Process(1 << 30, 0))


class Ray:
    """`failures`: so many questions that get no answer. `lost`: Ray does not hear of the host any more."""

    def __init__(self, failures: int = 0, lost: bool = False) -> None:
        self.failures = failures
        self.lost = lost

    async def run_on(self, host: str, function: Callable[..., Any], *arguments: object, timeout_s: float) -> Any:
        assert host == "host"
        if self.lost:
            raise ActorFailed("unschedulable")
        if self.failures:
            self.failures -= 1
            raise ActorHung("no answer")
        return await asyncio.to_thread(function, *arguments)

    async def is_alive(self, host: str) -> bool:
        return not self.lost


class World:
    """Virtual time, and routers, each of which knows some lives at each moment; None: it does not answer."""

    def __init__(self, patch: pytest.MonkeyPatch, *known: Callable[[float], list[WorkerRef] | None]) -> None:
        self.now = 0.0
        self._known = dict(zip(ROUTERS, known, strict=False))
        patch.setattr(burial, "time", SimpleNamespace(monotonic=lambda: self.now))
        patch.setattr(burial, "asyncio", SimpleNamespace(sleep=self._sleep))
        patch.setattr(burial, "look_up", self._look_up)
        patch.setattr(burial, "fetch_status", self._fetch_status)

    async def _sleep(self, seconds: float) -> None:
        self.now += seconds

    async def _look_up(self, _name: str) -> frozenset[str]:
        return frozenset(self._known)

    async def _fetch_status(self, address: str) -> Any:
        known = self._known[address](self.now)
        if known is None:
            raise Unreachable("away")
        refs = [worker_pb2.WorkerRef(worker_id=ref.worker_id, incarnation=ref.incarnation) for ref in known]
        workers = [worker_pb2.WorkerStatus(worker=worker_pb2.WorkerInfo(ref=ref)) for ref in refs]
        return worker_pb2.GetStatusResponse(workers=workers)


@pytest.mark.parametrize("failures", [0, 2])
async def test_on_a_host_that_answers_the_process_is_ended_there(failures: int) -> None:
    child = await asyncio.create_subprocess_exec("sleep", "1000")
    process = processes.find(child.pid)
    assert process is not None and processes.is_alive(process)
    await HostBurial(Ray(failures), ["nowhere:0"]).bury(REF, Location("host", process))  # type: ignore[arg-type]
    assert not processes.is_alive(process)
    assert await child.wait() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("known", "until_s"),
    [
        (lambda _: [], 0.0),
        (lambda _: [NEXT], 0.0),
        (lambda now: [REF, NEXT] if now < 40 else [NEXT], 40.0),  # cut off from Ray, and still serving
        (lambda now: None if now < 50 else [], 50.0),  # without a router nothing is known
        (lambda now: [REF] if now == 20 else [], 21.0),  # a new router met it once
        (lambda now: None if now == 29 else [], 30.0),
    ],
)
async def test_on_a_host_that_is_lost_it_is_dead_when_the_router_has_not_heard_of_it_for_long(
    monkeypatch: pytest.MonkeyPatch, known: Callable[[float], list[WorkerRef] | None], until_s: float
) -> None:
    for routers in ([known], [known, lambda _: []], [lambda _: [NEXT], known]):
        world = World(monkeypatch, *routers)
        await HostBurial(Ray(lost=True), ["registry:1"]).bury(REF, NOBODY)  # type: ignore[arg-type]
        assert until_s + UNHEARD_S - 1 <= world.now <= until_s + UNHEARD_S


async def test_a_router_that_never_forgets_it_keeps_it_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    def known(now: float) -> list[WorkerRef]:
        if now > 10_000:
            raise ZeroDivisionError
        return [REF]

    World(monkeypatch, known)
    with pytest.raises(ZeroDivisionError):
        await HostBurial(Ray(lost=True), ["registry:1"]).bury(REF, NOBODY)  # type: ignore[arg-type]
