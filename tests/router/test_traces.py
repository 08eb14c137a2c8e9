"""The spans that a router makes of what its dispatcher says and is told, over links that go nowhere."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from prometheus_client import CollectorRegistry

from core.errors import BadRequest
from core.handoff import HandoffTicket
from core.membership import Role, WorkerInfo, WorkerLoad, WorkerRef
from core.messages import PeerConnected, Refused, RefuseReason, ReserveBlocks, Reserved, StartPrefill, StepOutput
from core.request import (
    FinishReason,
    GenerateRequest,
    Placement,
    SamplingParams,
    StopConditions,
    TokenDelta,
    WorkUsage,
)
from router import live
from router.config import RouterConfig
from router.live import LiveDispatcher
from router.policy.routing_policy import HedgePolicy, RoutingPolicy
from router.policy_file import Policy
from telemetry.router_metrics import RoutingMetrics
from tests.router.test_live import StubLink
from tests.telemetry.spans import KeptSpans
from tests.worker_info import worker_info

TRACEPARENT: Final = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
REQUEST: Final = GenerateRequest("r1", (1, 2, 3), SamplingParams(), StopConditions(max_tokens=4))
TRACED: Final = replace(REQUEST, traceparent=TRACEPARENT)


def worker(name: str, role: Role) -> WorkerInfo:
    return worker_info(WorkerRef(name, "a"), role)


PREFILL: Final = worker("prefill-0", Role.PREFILL)
DECODES: Final = (worker("decode-0", Role.DECODE), worker("decode-1", Role.DECODE))


class Cluster:
    """A live dispatcher over stub links, whose spans are kept."""

    def __init__(self, *workers: WorkerInfo) -> None:
        self.kept = KeptSpans()
        self.tracer = self.kept.tracer()
        config, metrics = RouterConfig(Path("model"), "model"), RoutingMetrics(CollectorRegistry())
        self.dispatcher = LiveDispatcher(config, "router-0", asyncio.ensure_future, metrics, self.tracer)
        for info in workers:
            self.dispatcher.announce(info, WorkerLoad())
            self.link(info).on_open()
        for info in workers:
            for peer in workers:
                if peer.role is not info.role:
                    self.link(info).on_answer(PeerConnected(peer.ref, "shared-memory", 1.0))

    def link(self, info: WorkerInfo) -> Any:
        return self.dispatcher._links[info.ref]

    def busy(self) -> tuple[Any, str]:
        """The decode worker that was told of the request last, and the attempt's id."""
        links = [self.link(info) for info in DECODES if info.ref in self.dispatcher._links]
        (link,) = [link for link in links if link.sent and hasattr(link.sent[-1], "request")]
        return link, link.sent[-1].request.request_id

    def tree(self) -> list[str]:
        return self.kept.tree(self.tracer)


@pytest.fixture(autouse=True)
def stub_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "WorkerLink", StubLink)


async def test_a_request_by_a_prefill_worker() -> None:
    cluster = Cluster(PREFILL, DECODES[0])
    async with aclosing(cluster.dispatcher.generate(TRACED, Placement.REMOTE)) as deltas:
        first = asyncio.ensure_future(anext(deltas))
        await asyncio.sleep(0)
        reserve = cluster.link(DECODES[0]).sent[-1]
        assert isinstance(reserve, ReserveBlocks)
        attempt_id = reserve.request.request_id
        cluster.link(DECODES[0]).on_answer(Reserved(attempt_id, HandoffTicket(attempt_id, DECODES[0].ref, 1, 0, (5,))))
        start = cluster.link(PREFILL).sent[-1]
        assert isinstance(start, StartPrefill)
        usage = WorkUsage(cached_tokens=1, computed_tokens=2)
        cluster.link(PREFILL).on_answer(StepOutput((TokenDelta(attempt_id, 0, (7,), usage=usage),), WorkerLoad()))
        await first
        end = TokenDelta(attempt_id, 1, (8,), FinishReason.STOP)
        cluster.link(DECODES[0]).on_answer(StepOutput((end,), WorkerLoad()))
        assert [delta.token_ids async for delta in deltas] == [(8,)]
    assert cluster.tree() == ["wait", "attempt", "  reserve", "  prefill", "  decode"]
    spans = {span.name: span for span in cluster.kept.spans}
    assert spans["attempt"].attributes["tandem.reason"] == "asked"
    assert spans["attempt"].attributes["tandem.prefill_worker"] == "prefill-0@a"
    assert spans["prefill"].attributes["tandem.computed_tokens"] == 2
    attempt = spans["attempt"].context
    assert f"{attempt.trace_id:032x}" == TRACEPARENT.split("-")[1]
    # What both workers do belongs below the attempt.
    place = f"00-{attempt.trace_id:032x}-{attempt.span_id:016x}-01"
    assert reserve.request.traceparent == start.request.traceparent == place


async def test_a_stream_that_moves_is_one_trace_of_two_attempts() -> None:
    cluster = Cluster(*DECODES)
    async with aclosing(cluster.dispatcher.generate(TRACED, Placement.AUTO)) as deltas:
        first = asyncio.ensure_future(anext(deltas))
        await asyncio.sleep(0)
        link, attempt_id = cluster.busy()
        link.on_answer(StepOutput((TokenDelta(attempt_id, 0, (7,)),), WorkerLoad()))
        await first
        link.on_closed("it died")
        other, second_id = cluster.busy()
        end = TokenDelta(second_id, 1, (8,), FinishReason.LENGTH)
        other.on_answer(StepOutput((end,), WorkerLoad()))
        assert [delta.token_ids async for delta in deltas] == [(8,)]
    lost = "lost " + ("decode-0@a" if other is cluster.dispatcher._links.get(DECODES[1].ref) else "decode-1@a")
    assert cluster.tree() == [
        "wait", f"attempt !{lost}", "  prefill", f"  decode !{lost}",
        "attempt", "  prefill", "  decode",
    ]  # fmt: skip


async def test_what_a_worker_refuses_is_said_and_what_fails_too() -> None:
    cluster = Cluster(PREFILL, DECODES[0])
    stream = cluster.dispatcher.generate(TRACED, Placement.REMOTE)
    first = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    attempt_id = cluster.link(DECODES[0]).sent[-1].request.request_id
    cluster.link(DECODES[0]).on_answer(Refused(attempt_id, RefuseReason.TRANSFER_FAILED, "no path"))
    attempt_id = cluster.link(DECODES[0]).sent[-1].request.request_id
    cluster.link(DECODES[0]).on_answer(Refused(attempt_id, RefuseReason.BAD_REQUEST, "too long"))
    with pytest.raises(BadRequest):
        await first
    refused, error = "transfer_failed: no path", "bad_request: too long"
    assert cluster.tree() == [
        "wait", f"attempt !{refused}", f"  reserve !{refused}", f"attempt !{error}", f"  reserve !{error}",
    ]  # fmt: skip


async def test_a_hedge_is_an_attempt_beside_the_other_and_the_loser_says_so() -> None:
    cluster = Cluster(*DECODES)
    cluster.dispatcher.apply(Policy(routing=RoutingPolicy(hedge=HedgePolicy(after_s=1.0, max_share=1.0))))
    async with aclosing(cluster.dispatcher.generate(TRACED, Placement.AUTO)) as deltas:
        first = asyncio.ensure_future(anext(deltas))
        await asyncio.sleep(0)
        slow, _ = cluster.busy()
        cluster.dispatcher._perform(cluster.dispatcher._dispatcher.tick(time.monotonic() + 60.0))
        (fast,) = [link for link in map(cluster.link, DECODES) if link is not slow]
        attempt_id = fast.sent[-1].request.request_id
        fast.on_answer(StepOutput((TokenDelta(attempt_id, 0, (7,), FinishReason.STOP),), WorkerLoad()))
        await first
    assert cluster.tree() == [
        "wait", "attempt !recalled", "  prefill !recalled", "attempt", "  prefill", "  decode",
    ]  # fmt: skip
    hedges = [span.attributes.get("tandem.hedge") for span in cluster.kept.spans if span.name == "attempt"]
    assert hedges == [None, True]


async def test_who_has_lost_its_workers_waits_for_others() -> None:
    cluster = Cluster(DECODES[0])
    async with aclosing(cluster.dispatcher.generate(TRACED, Placement.AUTO)) as deltas:
        first = asyncio.ensure_future(anext(deltas))
        await asyncio.sleep(0)
        cluster.busy()[0].on_closed("it died")
        cluster.dispatcher.announce(DECODES[1], WorkerLoad())
        cluster.link(DECODES[1]).on_open()
        link, attempt_id = cluster.busy()
        link.on_answer(StepOutput((TokenDelta(attempt_id, 0, (7,), FinishReason.STOP),), WorkerLoad()))
        await first
    lost = "lost decode-0@a"
    assert cluster.tree() == [
        "wait", f"attempt !{lost}", f"  prefill !{lost}", "wait", "attempt", "  prefill", "  decode",
    ]  # fmt: skip


async def test_a_wait_without_workers_ends_with_its_reason_and_a_client_that_leaves_leaves_no_span() -> None:
    cluster = Cluster()
    for leaves in (False, True):
        waiting = asyncio.ensure_future(anext(cluster.dispatcher.generate(TRACED, Placement.AUTO)))
        await asyncio.sleep(0)
        if leaves:
            waiting.cancel()
        else:
            cluster.dispatcher._perform(cluster.dispatcher._dispatcher.tick(1e9))
        with suppress(Exception, asyncio.CancelledError):
            await waiting
    assert not cluster.dispatcher._traces._requests
    (line,) = cluster.tree()
    assert line.startswith("wait !")


async def test_a_request_that_is_not_traced_keeps_nothing() -> None:
    cluster = Cluster(*DECODES)
    async with aclosing(cluster.dispatcher.generate(REQUEST, Placement.AUTO)) as deltas:
        first = asyncio.ensure_future(anext(deltas))
        await asyncio.sleep(0)
        assert not cluster.dispatcher._traces._requests and not cluster.dispatcher._traces._attempts
        link, attempt_id = cluster.busy()
        assert link.sent[-1].request.traceparent == ""
        link.on_answer(StepOutput((TokenDelta(attempt_id, 0, (7,), FinishReason.STOP),), WorkerLoad()))
        await first
    assert cluster.tree() == []
