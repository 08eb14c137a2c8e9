"""The controller of several hosts, on one: probes, what an earlier controller left, deaths for a router that is new."""

from __future__ import annotations

import asyncio
import copy
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from ready_workers import ready_workers
from stub_processes import StubRouterService
from tandem.v1 import worker_pb2, worker_pb2_grpc

from cluster import host_controller
from cluster.actors import ProcessPaths, ServingWorker
from cluster.config import ClusterConfig
from cluster.host_controller import HostController
from cluster.progress import Progress
from cluster.ray_runtime import RayRuntime
from core.errors import BadRequest
from core.membership import Role, WorkerRef
from tests.worker_info import worker_info

STUBS = ProcessPaths(worker="stub_processes:StubWorkerProcess")
TIMEOUT_S = 60.0


class Registry(StubRouterService):
    """A router that remembers who it was told is dead."""

    def __init__(self, router_id: str) -> None:
        super().__init__()
        self._router_id = router_id
        self.dead: set[WorkerRef] = set()

    async def GetStatus(self, request: Any, context: Any) -> Any:
        status = await super().GetStatus(request, context)
        return worker_pb2.GetStatusResponse(workers=status.workers, router_id=self._router_id)

    async def ReportDeath(self, request: Any, _context: Any) -> Any:
        self.dead.add(WorkerRef(request.worker.worker_id, request.worker.incarnation))
        return worker_pb2.ReportDeathResponse()


@asynccontextmanager
async def router(port: int, router_id: str) -> AsyncIterator[Registry]:
    registry = Registry(router_id)
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    worker_pb2_grpc.add_RouterServiceServicer_to_server(registry, server)
    assert server.add_insecure_port(f"127.0.0.1:{port}") == port
    await server.start()
    try:
        yield registry
    finally:
        await server.stop(0.0)


class Borrowed:
    """The tests' own Ray, which neither starts nor ends with a controller."""

    def __init__(self, runtime: RayRuntime) -> None:
        self._runtime = runtime

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    async def start(self, _timeout_s: float) -> None: ...

    async def stop(self, _timeout_s: float) -> None: ...


@pytest.fixture
def config(ray_runtime: RayRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterConfig:
    monkeypatch.setattr(RayRuntime, "joined", lambda _address: Borrowed(ray_runtime))
    for name in ray_runtime.notes():  # of other tests' workers
        ray_runtime.forget(name)
    # The tests' Ray has no custom resources; their placement: tests/acceptance/test_hosts.py.
    monkeypatch.setattr(host_controller, "RESOURCES", {Role.PREFILL: None, Role.DECODE: None})
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        ports = [probe.getsockname()[1] for probe in (first, second)]
    return ClusterConfig(
        tmp_path,
        registry_port=ports[0],
        controller_port=0,
        controller_health_port=ports[1],
        ray_address="borrowed:1",
        drain_timeout_s=1.0,
    )


async def probe(config: ClusterConfig, path: str) -> int:
    """HTTP status; 0 when nobody answers."""
    try:
        async with aiohttp.request("GET", f"http://127.0.0.1:{config.controller_health_port}/{path}") as response:
            return response.status
    except aiohttp.ClientError:
        return 0


async def until(done: Any) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not await done():  # noqa: ASYNC110 - a probe over HTTP has no event
            await asyncio.sleep(0.05)


@asynccontextmanager
async def controller(config: ClusterConfig) -> AsyncIterator[HostController]:
    """One that is ready, and that dies at the end: nobody drains, nobody ends the workers."""
    made = HostController(config, Progress(), STUBS)
    running = asyncio.create_task(made.run(asyncio.Event()))

    async def ready() -> bool:
        return running.done() or await probe(config, "readyz") == 200

    try:
        await until(ready)
        assert not running.done(), running.result()
        assert await probe(config, "livez") == 200
        yield made
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert await probe(config, "livez") == 0


def living(controller: HostController) -> set[WorkerRef]:
    return set(ready_workers(controller._controller._fleet).values())


async def heard(registry: Registry, dead: set[WorkerRef]) -> None:
    """Also of one that was starting when its controller died, perhaps."""

    async def told() -> bool:
        return registry.dead >= dead

    await until(told)


async def switch(runtime: RayRuntime, ref: WorkerRef, to: Role, *, stands_in: bool) -> str:
    return str(await runtime.actors()[str(ref)].call("switch_role", to, stands_in, 1.0, 0.5, timeout_s=TIMEOUT_S))


async def serve_as_configured(runtime: RayRuntime, refs: set[WorkerRef]) -> bool:
    actors = [runtime.actors()[str(ref)] for ref in refs]
    found = [await actor.call("describe", timeout_s=TIMEOUT_S) for actor in actors]
    return all(it is not None and it.info.role is it.config.role and not it.stands_in for it in found)


async def pid_of(runtime: RayRuntime, ref: WorkerRef) -> int:
    return int(await runtime.actors()[str(ref)].call("ping", timeout_s=TIMEOUT_S))


async def test_a_new_controller_takes_over_what_is_as_it_would_start_it_and_ends_the_rest(
    config: ClusterConfig, ray_runtime: RayRuntime
) -> None:
    async with router(config.registry_port, "first") as registry:
        async with controller(config) as first:
            before = living(first)
            assert {ref.worker_id for ref in before} == {"prefill-0", "decode-0"}
            for ref in before:  # both decode: prefill-0 stands in, decode-0 is what it always was
                assert await switch(ray_runtime, ref, Role.DECODE, stands_in=ref.worker_id == "prefill-0") == ""
        async with controller(config) as second:
            assert living(second) == before and not registry.dead
            await until(partial(serve_as_configured, ray_runtime, before))
            (decode,) = (ref for ref in before if ref.worker_id == "decode-0")
            os.kill(await pid_of(ray_runtime, decode), signal.SIGKILL)  # it is watched like one of its own
            await heard(registry, {decode})
        (prefill,) = before - {decode}
        os.kill(await pid_of(ray_runtime, prefill), signal.SIGKILL)  # nobody watches
        async with controller(config) as third:
            await heard(registry, before)
            after = living(third)
            assert len(after) == 2 and not after & registry.dead
        changed = replace(config, num_blocks=config.num_blocks + 1)
        async with controller(changed) as fourth:
            await heard(registry, before | after)
            last = living(fourth)
            assert len(last) == 2 and not last & registry.dead
    for settings in (replace(changed, keep_workers=True), changed):
        async with router(config.registry_port, "another") as registry:  # which hears of all deaths, from a controller
            fifth = HostController(settings, Progress(), STUBS)  # that saw none of them
            stop = asyncio.Event()
            running = asyncio.create_task(fifth.run(stop))
            await heard(registry, before | after)
            assert living(fifth) == last and not last & registry.dead
            stop.set()
            async with asyncio.timeout(TIMEOUT_S):
                await running
        assert ray_runtime.actors().keys() == ({str(ref) for ref in last} if settings.keep_workers else set())


async def test_a_worker_of_a_release_with_fewer_fields_is_not_taken_over(config: ClusterConfig) -> None:
    controller, ref = HostController(config, Progress(), STUBS), WorkerRef("decode-0", "of-before")
    ours = controller._worker_config(ref, Role.PREFILL)  # it had changed its role
    found = ServingWorker(ours, worker_info(ref, Role.PREFILL))
    assert controller._is_wanted(found, ref, Role.DECODE)
    assert not controller._is_wanted(replace(found, revision=found.revision - 1), ref, Role.DECODE)
    for old in (_as_of_earlier(found, "stands_in"), replace(found, config=_as_of_earlier(ours, "drain_finish_s"))):
        assert not controller._is_wanted(old, ref, Role.DECODE)


def _as_of_earlier(value: Any, new_field: str) -> Any:
    """As it is read when it was pickled before its class had that field."""
    old = copy.copy(value)
    object.__delattr__(old, new_field)
    return old


async def test_a_health_port_in_use_is_named_before_anything_starts(config: ClusterConfig) -> None:
    with socket.create_server(("127.0.0.1", config.controller_health_port)), pytest.raises(BadRequest) as caught:
        await HostController(config, Progress(), STUBS).run(asyncio.Event())
    assert caught.value.field == "controller_health_port"
