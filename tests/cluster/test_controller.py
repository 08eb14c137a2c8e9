"""The controller on a real Ray: actors that die, hang or cannot start."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from random import SystemRandom
from typing import Any

import pytest
from listening import is_loopback, listening_addresses
from ready_workers import ready_workers
from stub_processes import STUCK_S

from cluster import processes
from cluster.actors import WorkerActor
from cluster.burial import bury_here
from cluster.config import ClusterConfig, worker_config
from cluster.controller import Controller
from cluster.fleet import DrainRefused, Fleet, RefusalReason
from cluster.fleet_events import Event, StartFailed, StartWorker, WorkerDied, WorkerStarted
from cluster.ray_runtime import Actor, ActorFailed, RayRuntime
from cluster.worker.config import WorkerConfig
from core.membership import Role, WorkerRef

STUB = "stub_processes:StubWorkerProcess"
TIMEOUT_S = 30.0


class Cluster:
    """A controller, its actors by worker id, and what it has reported."""

    def __init__(self, runtime: RayRuntime, config: ClusterConfig, logs: Path) -> None:
        self._runtime = runtime
        self.config = config
        self.logs = logs
        self.actors: dict[str, Actor] = {}
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.deaths: asyncio.Queue[WorkerRef] = asyncio.Queue()
        self.fleet = Fleet(config.roles, SystemRandom())
        self.controller = Controller(
            self.fleet, self._spawn, config, self.events.put_nowait, bury_here, self.deaths.put
        )

    def _spawn(self, order: StartWorker) -> tuple[Actor, WorkerConfig]:
        ref = order.ref
        log_file = self.logs / f"{ref.worker_id}.log"
        self.actors[ref.worker_id] = self._runtime.create(WorkerActor, str(ref), STUB)
        return self.actors[ref.worker_id], worker_config(
            self.config,
            ref.worker_id,
            ref.incarnation,
            order.role,
            router_addresses=("nowhere:0",),
            log_file=log_file,
        )

    async def next(self, wanted: Callable[[Any], bool]) -> Any:
        async with asyncio.timeout(TIMEOUT_S):
            while not wanted(event := await self.events.get()):
                pass
        return event

    async def next_of(self, kind: type) -> Any:
        return await self.next(lambda event: isinstance(event, kind))

    async def all_ready(self) -> None:
        await self.next(lambda _: self.controller.all_ready)


@pytest.fixture
async def make_cluster(ray_runtime: RayRuntime, tmp_path: Path) -> Any:
    running: list[tuple[Cluster, asyncio.Task[None]]] = []

    def make(**settings: Any) -> Cluster:
        config = ClusterConfig(**{"model_folder": tmp_path, "drain_timeout_s": 1.0, **settings})
        cluster = Cluster(ray_runtime, config, tmp_path)
        running.append((cluster, asyncio.create_task(cluster.controller.run())))
        return cluster

    yield make
    for cluster, task in running:
        await cluster.controller.stop(cluster.config.drain_timeout_s)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_killed_worker_is_replaced_by_a_new_incarnation(make_cluster: Any) -> None:
    cluster = make_cluster()
    await cluster.all_ready()
    before = ready_workers(cluster.fleet)
    prefill_pid = await cluster.actors["prefill-0"].call("ping", timeout_s=5.0)
    pid = await cluster.actors["decode-0"].call("ping", timeout_s=5.0)

    os.kill(pid, signal.SIGKILL)

    assert await cluster.next_of(WorkerDied) == WorkerDied(before["decode-0"], "its process ended")
    assert await asyncio.wait_for(cluster.deaths.get(), TIMEOUT_S) == before["decode-0"]
    assert (await cluster.next_of(WorkerStarted)).ref.worker_id == "decode-0"
    after = ready_workers(cluster.fleet)
    assert after["decode-0"].incarnation != before["decode-0"].incarnation
    assert after["prefill-0"] == before["prefill-0"]
    assert await cluster.actors["decode-0"].call("ping", timeout_s=5.0) != pid
    assert await cluster.actors["prefill-0"].call("ping", timeout_s=5.0) == prefill_pid


async def test_a_frozen_worker_is_killed_and_replaced(make_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.controller.PING_EVERY_S", 0.2)
    cluster = make_cluster(heartbeat_timeout_s=1.0, aggregated=True)
    await cluster.all_ready()
    pid = await cluster.actors["decode-0"].call("ping", timeout_s=5.0)
    (frozen,) = {process for process in processes.descendants(os.getpid()) if process.pid == pid}

    os.kill(pid, signal.SIGSTOP)

    assert (await cluster.next_of(WorkerDied)).reason == "hung: no answer for 1 s"
    await asyncio.wait_for(cluster.deaths.get(), TIMEOUT_S)
    assert not processes.is_alive(frozen)  # never reported before it is true
    await cluster.next_of(WorkerStarted)


async def test_a_role_is_changed_kept_or_given_to_the_next_life_and_one_worker_at_a_time(make_cluster: Any) -> None:
    cluster = make_cluster(num_decode=2)
    await cluster.all_ready()
    controller: Controller = cluster.controller
    before = ready_workers(cluster.fleet)["decode-1"]
    assert await controller.drain("decode-1", Role.PREFILL, force=False, timeout_s=1.0)
    assert ready_workers(cluster.fleet)["decode-1"] == before and controller.all_ready
    assert cluster.fleet.role_of("decode-1") is Role.PREFILL
    assert not await controller.drain("decode-1", Role.PREFILL, force=False, timeout_s=1.0)
    with pytest.raises(DrainRefused, match="no decode") as kept:
        await controller.drain("decode-1", Role.DECODE, force=False, timeout_s=0.5)
    assert kept.value.reason is RefusalReason.NOT_DRAINED and controller.all_ready
    assert cluster.fleet.role_of("decode-1") is Role.PREFILL

    dies = asyncio.create_task(controller.drain("decode-1", Role.DECODE, force=False, timeout_s=STUCK_S))
    await asyncio.sleep(0)
    with pytest.raises(DrainRefused, match="decode-1 is draining"):
        await controller.drain("prefill-0", Role.DECODE, force=False, timeout_s=1.0)
    os.kill(await cluster.actors["decode-1"].call("ping", timeout_s=5.0), signal.SIGKILL)
    with pytest.raises(DrainRefused) as lost:
        await dies
    assert lost.value.reason is RefusalReason.WORKER_LOST
    await cluster.next_of(WorkerDied)
    await cluster.next_of(WorkerStarted)
    assert cluster.fleet.role_of("decode-1") is Role.DECODE


async def test_a_worker_that_cannot_start_says_why_and_logs_where(make_cluster: Any, tmp_path: Path) -> None:
    cluster = make_cluster(model_folder=tmp_path / "broken", aggregated=True)
    failure = await cluster.next_of(StartFailed)
    assert failure.reason == "BadRequest: model_folder: has no weights"
    assert "stub_processes.py" in (cluster.logs / "decode-0.log").read_text()


async def test_stop_ends_every_worker_process(make_cluster: Any) -> None:
    cluster = make_cluster()
    await cluster.all_ready()
    pids = {await actor.call("ping", timeout_s=5.0) for actor in cluster.actors.values()}
    workers = {process for process in processes.descendants(os.getpid()) if process.pid in pids}
    assert len(workers) == 2
    await cluster.controller.stop(cluster.config.drain_timeout_s)
    assert not await processes.wait_gone(workers, timeout_s=10.0)


async def test_everything_listens_on_loopback_only(make_cluster: Any) -> None:
    cluster = make_cluster()
    await cluster.all_ready()
    addresses = listening_addresses(process.pid for process in processes.descendants(os.getpid()))
    assert addresses and all(map(is_loopback, addresses)), addresses
    # The control: an open socket is found.
    async with await asyncio.start_server(lambda *_: None, "0.0.0.0", 0):
        assert not all(map(is_loopback, listening_addresses([os.getpid()])))


class Parent:
    """An actor with a process below it, as a worker has its ranks."""

    async def start_one(self) -> tuple[int, int]:
        command = [sys.executable, "-c", "import time; time.sleep(600)"]
        return os.getpid(), (await asyncio.create_subprocess_exec(*command)).pid


async def test_what_an_actor_has_started_ends_with_it_also_when_it_is_frozen(ray_runtime: RayRuntime) -> None:
    """A rank that has not come to ask the kernel for that can do nothing for itself."""
    own, below = await ray_runtime.create(Parent, "parent").call("start_one", timeout_s=20.0)
    process = processes.find(below)
    assert process is not None and processes.is_alive(process)
    os.kill(below, signal.SIGSTOP)
    os.kill(own, signal.SIGKILL)
    assert not await processes.wait_gone([process], timeout_s=20.0)


async def test_an_actor_has_its_thread_settings_and_no_ray_priority(ray_runtime: RayRuntime, tmp_path: Path) -> None:
    actor = ray_runtime.create(WorkerActor, "probe", STUB)
    pid = await actor.call("ping", timeout_s=20.0)
    assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0)
    with pytest.raises(ActorFailed, match="ModuleNotFoundError"):
        other = ray_runtime.create(WorkerActor, "other", "nowhere:Host")
        config = WorkerConfig(
            worker_id="x",
            incarnation="1",
            role=Role.DECODE,
            model_folder=tmp_path,
            router_addresses=("nowhere:0",),
            log_file=tmp_path / "other.log",
        )
        await other.call("start", config, timeout_s=20.0)
    assert "ModuleNotFoundError" in (tmp_path / "other.log").read_text()
    actor.kill()
    other.kill()
    actor.kill()  # harmless
