"""`tandem leave` over gRPC: who is here is drained, who refuses is asked again, and it ends in time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tandem.v1 import worker_pb2, worker_pb2_grpc

from cluster.config import ClusterConfig
from cluster.controller_service import listen_controller
from cluster.fleet import DrainRefused, RefusalReason
from cluster.free_ports import free_ports
from cluster.leave import is_own, keep_asking, leave
from cluster.main import main
from core.errors import BadRequest
from core.membership import Role

ELSEWHERE = "192.0.2.7:1"  # RFC 5737: nobody's
LAST = DrainRefused(RefusalReason.LAST_DECODE_WORKER, "the last one")


class Controller:
    """Refuses as often as it is told to; remembers whom it was asked for."""

    def __init__(self) -> None:
        self.refusals: list[DrainRefused] = []
        self.asked: list[str] = []

    async def drain(self, worker_id: str, to: Role | None, *, force: bool, timeout_s: float) -> bool:
        assert to is None and not force and 0.0 < timeout_s <= 60.0
        self.asked.append(worker_id)
        if self.refusals:
            raise self.refusals.pop()
        return True


class Registry(worker_pb2_grpc.RouterServiceServicer):
    """Knows these workers."""

    def __init__(self, **addresses: str) -> None:
        self.addresses = addresses

    async def GetStatus(self, request: Any, context: Any) -> worker_pb2.GetStatusResponse:
        status = worker_pb2.GetStatusResponse()
        for worker_id, address in self.addresses.items():
            ref = worker_pb2.WorkerRef(worker_id=worker_id, incarnation="a")
            status.workers.add(worker=worker_pb2.WorkerInfo(ref=ref, address=address), life="ready")
        return status


class Cluster:
    def __init__(self, controller: Controller, registry: Registry, addresses: tuple[str, str]) -> None:
        self.controller, self.registry, self.addresses = controller, registry, addresses

    async def leave(self, within_s: float) -> str:
        registry, controller = self.addresses
        return await leave([registry], controller, 0.0, within_s)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    controller, registry = Controller(), Registry(here="127.0.0.1:1", there=ELSEWHERE)
    (port,) = free_ports(1)
    config = ClusterConfig(tmp_path, controller_port=port)
    served = await listen_controller(controller, config)  # type: ignore[arg-type]
    server = grpc.aio.server()
    worker_pb2_grpc.add_RouterServiceServicer_to_server(registry, server)
    registry_port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield Cluster(controller, registry, (f"127.0.0.1:{registry_port}", config.controller_address))
    await server.stop(None)
    await served.stop(None)


async def test_the_workers_of_this_host_alone_are_drained(cluster: Cluster) -> None:
    assert await cluster.leave(60.0) == ""
    assert cluster.controller.asked == ["here"]
    cluster.registry.addresses = {"there": ELSEWHERE}
    assert await cluster.leave(60.0) == ""
    assert cluster.controller.asked == ["here"]


async def test_who_refuses_is_asked_again(cluster: Cluster) -> None:
    cluster.controller.refusals = [DrainRefused(RefusalReason.BUSY, "another one is draining")]
    assert await cluster.leave(60.0) == ""
    assert cluster.controller.asked == ["here", "here"]


async def test_what_is_left_when_the_time_is_over_is_said(cluster: Cluster) -> None:
    cluster.controller.refusals = [LAST] * 100
    assert await cluster.leave(0.3) == "the last one"
    registry, controller = cluster.addresses
    assert "127.0.0.1:9" in await leave(["127.0.0.1:9"], controller, 0.0, 0.3)
    assert "127.0.0.1:9" in await leave([registry], "127.0.0.1:9", 0.0, 0.3)


async def test_asking_ends_in_time_although_the_answer_does_not_come() -> None:
    async def never() -> str:
        await asyncio.Event().wait()
        return ""

    assert await keep_asking(never, asyncio.get_running_loop().time() + 0.05) == "not asked in time"


async def test_nobody_is_asked_before_the_pause_is_over(cluster: Cluster) -> None:
    """A cluster that ends as a whole drains its workers itself, and refuses."""
    registry, controller = cluster.addresses
    assert await leave([registry], controller, 60.0, 0.05) == "not asked in time"
    assert cluster.controller.asked == []


async def test_a_wrong_address_is_wrong_use() -> None:
    with pytest.raises(BadRequest):
        await leave(["nowhere"], "127.0.0.1:9", 0.0, 1.0)
    assert await asyncio.to_thread(main, ["leave", "--registry", "nowhere", "--within", "1"]) == 2


def test_exit_codes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answers = iter(["", "decode-0 is the last one"])

    async def answered(*_: object) -> str:
        return next(answers)

    monkeypatch.setattr("cluster.leave.leave", answered)
    assert main(["leave"]) == 0
    assert main(["leave", "--within", "5"]) == 1
    assert capsys.readouterr().err == "tandem: after 5 s: decode-0 is the last one\n"


@pytest.mark.parametrize(("address", "own"), [("127.0.0.1:80", True), ("127.0.0.7:1", True), (ELSEWHERE, False)])
def test_whose_an_address_is(address: str, own: bool) -> None:
    assert is_own(address) is own
