"""`tandem role` and `tandem drain` to the controller and back, over gRPC: each outcome is told as what it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cluster import controller_client
from cluster.config import ClusterConfig
from cluster.controller_client import Drained, drain_worker
from cluster.controller_service import OUTCOMES, listen_controller
from cluster.fleet import DrainRefused, RefusalReason
from cluster.free_ports import free_ports
from core.errors import BadRequest, Unreachable
from core.membership import Role


class Controller:
    """Answers as it is told to; remembers what it was asked."""

    def __init__(self) -> None:
        self.answer: bool | Exception = True
        self.asked: list[tuple[Any, ...]] = []
        self.hangs = False

    async def drain(self, worker_id: str, to: Role | None, *, force: bool, timeout_s: float) -> bool:
        self.asked.append((worker_id, to, force, timeout_s))
        if self.hangs:
            await asyncio.Event().wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
async def served(tmp_path: Any) -> AsyncIterator[tuple[Controller, str]]:
    (port,) = free_ports(1)
    config = ClusterConfig(tmp_path, controller_port=port, drain_timeout_s=7.0)
    controller = Controller()
    server = await listen_controller(controller, config)  # type: ignore[arg-type]
    yield controller, config.controller_address
    await server.stop(None)


async def test_a_switch_and_a_drain_are_asked_for_and_answered(served: tuple[Controller, str]) -> None:
    controller, address = served
    done = await drain_worker(address, "decode-1", "prefill", force=True, timeout_s=2.0)
    assert done.changed and done.duration_s >= 0.0
    await drain_worker(address, "decode-1", None, force=False, timeout_s=0.0)
    assert controller.asked == [("decode-1", Role.PREFILL, True, 2.0), ("decode-1", None, False, 7.0)]
    controller.answer = False
    unchanged = await drain_worker(address, "decode-1", "decode", force=False, timeout_s=0.0)
    assert isinstance(unchanged, Drained) and not unchanged.changed


async def test_a_controller_that_never_answers_is_not_waited_for(
    served: tuple[Controller, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller_client, "ANSWER_TIMEOUT_S", 0.1)
    controller, address = served
    assert (await drain_worker(address, "decode-1", None, force=False, timeout_s=0.1)).changed
    controller.hangs = True
    with pytest.raises(Unreachable, match="DEADLINE_EXCEEDED"):
        await drain_worker(address, "decode-1", None, force=False, timeout_s=0.1)


@pytest.mark.parametrize("reason", RefusalReason)
async def test_each_refusal_has_its_outcome(reason: RefusalReason, served: tuple[Controller, str]) -> None:
    controller, address = served
    controller.answer = DrainRefused(reason, "because")
    with pytest.raises(DrainRefused, match="because") as caught:
        await drain_worker(address, "decode-1", "prefill", force=False, timeout_s=0.0)
    assert caught.value.reason is reason
    assert len(set(OUTCOMES.values())) == len(RefusalReason)


@pytest.mark.parametrize("timeout_s", [-1.0, 1e9, float("nan")])
async def test_a_bad_timeout_is_named_and_nobody_is_drained(timeout_s: float, served: tuple[Controller, str]) -> None:
    controller, address = served
    with pytest.raises(BadRequest) as caught:
        await drain_worker(address, "decode-1", None, force=False, timeout_s=timeout_s)
    assert caught.value.field == "timeout_s" and not controller.asked


async def test_nobody_there_and_an_address_in_use_are_named(served: tuple[Controller, str], tmp_path: Any) -> None:
    _, address = served
    with pytest.raises(Unreachable):
        await drain_worker("127.0.0.1:9", "decode-1", None, force=False, timeout_s=0.0)
    config = ClusterConfig(tmp_path, controller_port=int(address.rpartition(":")[2]))
    with pytest.raises(BadRequest) as caught:
        await listen_controller(Controller(), config)  # type: ignore[arg-type]
    assert caught.value.field == "controller_port" and str(caught.value).endswith("may listen there")
