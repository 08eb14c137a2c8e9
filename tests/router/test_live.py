"""The live dispatcher, with links that go nowhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from core.errors import BadRequest, Rejected, RejectReason
from core.membership import WorkerLoad, WorkerRef
from core.messages import Answer, CancelRequest, Command, PeerDead, StartGeneration, StepOutput
from core.request import FinishReason, GenerateRequest, Placement, SamplingParams, StopConditions, TokenDelta
from router import live
from router.admission.policy import AdmissionPolicy, TenantPolicy
from router.config import RouterConfig
from router.live import LiveDispatcher
from router.policy.routing_policy import HedgePolicy, RoutingPolicy
from router.policy_file import Policy
from telemetry.router_metrics import RouterStateCollector, RoutingMetrics
from tests.worker_info import worker_info

WORKER = worker_info(WorkerRef("decode-0", "a"), num_blocks=64)
REQUEST = GenerateRequest("r1", (1, 2, 3), SamplingParams(), StopConditions(max_tokens=4))


class StubLink:
    """Keeps what was sent."""

    def __init__(
        self,
        *_: Any,
        on_open: Callable[[], None],
        on_answer: Callable[[Answer], None],
        on_closed: Callable[[str], None],
        spawn: object,
    ) -> None:
        self.on_open, self.on_answer, self.on_closed = on_open, on_answer, on_closed
        self.sent: list[Command] = []

    def send(self, command: Command) -> None:
        self.sent.append(command)

    async def close(self) -> None:
        pass


def live_dispatcher(registry: CollectorRegistry) -> LiveDispatcher:
    config = RouterConfig(Path("model"), "model")
    return LiveDispatcher(config, "router-0", asyncio.ensure_future, RoutingMetrics(registry))


async def test_a_slow_client_ends_in_order_after_the_links_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "WorkerLink", StubLink)
    dispatcher = live_dispatcher(CollectorRegistry())
    dispatcher.announce(WORKER, WorkerLoad())
    link: Any = dispatcher._links[WORKER.ref]
    link.on_open()
    async with aclosing(dispatcher.generate(REQUEST, Placement.AUTO)) as deltas:
        first = asyncio.ensure_future(anext(deltas))
        await asyncio.sleep(0)
        attempt_id = link.sent[-1].request.request_id
        link.on_answer(StepOutput((TokenDelta(attempt_id, 0, (7,)),), WorkerLoad()))
        assert (await first).token_ids == (7,)
        await dispatcher.close(grace_s=0.01)
    assert link.sent[-1] == CancelRequest(attempt_id)
    assert dispatcher.num_open == 0


async def test_a_client_that_leaves_gives_its_permit_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """In line, and with a token out; and one that is turned away never keeps it."""
    monkeypatch.setattr(live, "WorkerLink", StubLink)
    dispatcher = live_dispatcher(CollectorRegistry())
    tenants = {"t": TenantPolicy(max_concurrent=1)}
    dispatcher.apply(Policy(admission=AdmissionPolicy(tenants=tenants)))
    request = replace(REQUEST, tenant="t")
    small = replace(WORKER, num_blocks=16)
    for ready in (False, True):
        if ready:
            dispatcher.announce(small, WorkerLoad())
            dispatcher._links[small.ref].on_open()  # type: ignore[attr-defined]
        leaving = dispatcher.generate(request, Placement.AUTO)
        first = asyncio.ensure_future(anext(leaving))
        await asyncio.sleep(0)
        with pytest.raises(Rejected, match="tenant_concurrency"):
            await anext(dispatcher.generate(request, Placement.AUTO))
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await leaving.aclose()
    paid: list[int] = []
    give_back = dispatcher._limiter.give_back
    monkeypatch.setattr(
        dispatcher._limiter, "give_back", lambda permit, used: (paid.append(used), give_back(permit, used))
    )
    for _ in range(2):  # refused by the dispatcher, after the permit was taken
        with pytest.raises(BadRequest):
            await anext(dispatcher.generate(replace(request, stop=StopConditions(max_tokens=2000)), Placement.AUTO))
    assert paid == [0, 0]


async def test_an_id_in_use_is_refused_and_its_owner_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "WorkerLink", StubLink)
    dispatcher = live_dispatcher(CollectorRegistry())
    dispatcher.announce(WORKER, WorkerLoad())
    link: Any = dispatcher._links[WORKER.ref]
    link.on_open()
    stream = dispatcher.generate(REQUEST, Placement.AUTO)
    first = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    with pytest.raises(BadRequest, match="request_id"):
        await anext(dispatcher.generate(REQUEST, Placement.AUTO))
    link.on_answer(StepOutput((TokenDelta(link.sent[-1].request.request_id, 0, (7, 8)),), WorkerLoad()))
    assert (await first).token_ids == (7, 8)
    await stream.aclose()
    again = asyncio.ensure_future(anext(dispatcher.generate(REQUEST, Placement.AUTO)))
    await asyncio.sleep(0)
    assert not again.done()
    again.cancel()
    await asyncio.gather(again, return_exceptions=True)


async def test_a_request_that_was_cut_short_pays_for_its_tokens_and_one_that_was_turned_away_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "WorkerLink", StubLink)
    dispatcher = live_dispatcher(CollectorRegistry())
    tenants = {"t": TenantPolicy(tokens_per_s=0.001, burst_tokens=100)}
    dispatcher.apply(Policy(admission=AdmissionPolicy(tenants=tenants)))
    used: list[int] = []
    monkeypatch.setattr(dispatcher._limiter, "give_back", lambda _permit, used_tokens: used.append(used_tokens))
    dispatcher.announce(WORKER, WorkerLoad())
    link: Any = dispatcher._links[WORKER.ref]
    link.on_open()
    for num_tokens in (0, 2):
        stream = dispatcher.generate(replace(REQUEST, tenant="t"), Placement.AUTO)
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        if num_tokens:
            attempt_id = link.sent[-1].request.request_id
            link.on_answer(StepOutput((TokenDelta(attempt_id, 0, (7, 8)),), WorkerLoad()))
            await first
            first = asyncio.ensure_future(anext(stream))
        dispatcher._put("r1", Rejected(RejectReason.TIMEOUT, "too long"))
        with pytest.raises(Rejected):
            await first
    assert used == [0, len(REQUEST.prompt_token_ids) + 2]


async def test_a_stream_ends_with_the_last_of_its_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "WorkerLink", StubLink)
    dispatcher = live_dispatcher(CollectorRegistry())
    dispatcher.announce(WORKER, WorkerLoad())
    link: Any = dispatcher._links[WORKER.ref]
    link.on_open()
    heard = []
    async with aclosing(dispatcher.generate(replace(REQUEST, num_choices=2), Placement.AUTO)) as deltas:
        first = asyncio.ensure_future(anext(deltas))
        await asyncio.sleep(0)
        attempt_id = link.sent[-1].request.request_id
        stop = FinishReason.STOP
        link.on_answer(StepOutput((TokenDelta(attempt_id, 0, (7,), stop),), WorkerLoad()))
        heard.append(await first)
        later = [TokenDelta(attempt_id, 0, (8,), choice=1), TokenDelta(attempt_id, 1, (9,), stop, choice=1)]
        link.on_answer(StepOutput(tuple(later), WorkerLoad()))
        heard += [delta async for delta in deltas]
    assert [(delta.choice, delta.token_ids) for delta in heard] == [(0, (7,)), (1, (8, 9))]
    assert dispatcher.num_open == 0


async def test_a_worker_that_links_up_later_hears_of_earlier_deaths(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new router is told of a death before any worker has found it; one may keep blocks locked for the dead."""
    monkeypatch.setattr(live, "WorkerLink", StubLink)
    dispatcher = live_dispatcher(CollectorRegistry())
    dead = WorkerRef("prefill-0", "1")
    await dispatcher.report_death(dead)
    dispatcher.announce(WORKER, WorkerLoad())
    link: Any = dispatcher._links[WORKER.ref]
    link.on_open()
    assert link.sent == [PeerDead(dead)]


async def test_a_lost_worker_is_dialled_again_when_it_announces_itself_and_a_dead_one_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "WorkerLink", StubLink)
    dispatcher = live_dispatcher(CollectorRegistry())
    dispatcher.announce(WORKER, WorkerLoad())
    first: Any = dispatcher._links[WORKER.ref]
    first.on_open()
    first.on_closed("silent")
    assert dispatcher.why_not_ready() is not None
    dispatcher.announce(WORKER, WorkerLoad())
    second: Any = dispatcher._links[WORKER.ref]
    second.on_open()
    assert second is not first and dispatcher.why_not_ready() is None
    await dispatcher.report_death(WORKER.ref)
    with pytest.raises(BadRequest, match="dead"):
        dispatcher.announce(WORKER, WorkerLoad())


async def test_what_a_scrape_sees_of_routing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "WorkerLink", StubLink)
    registry = CollectorRegistry()
    dispatcher = live_dispatcher(registry)
    registry.register(RouterStateCollector(dispatcher.state, "tiny"))
    value = registry.get_sample_value
    waiting = asyncio.ensure_future(anext(dispatcher.generate(REQUEST, Placement.AUTO)))
    await asyncio.sleep(0)
    assert value("tandem_router_queued_requests") == 1
    for _ in range(2):  # the second time it is known, and its load is kept
        dispatcher.announce(WORKER, WorkerLoad(used_blocks=16))
    assert value("tandem_router_workers", {"role": "decode", "life": "starting"}) == 1
    link: Any = dispatcher._links[WORKER.ref]
    link.on_open()
    assert value("tandem_router_queued_requests") == 0
    assert value("tandem_router_plans_total", {"reason": "no_prefill_worker"}) == 1
    assert value("tandem_router_queue_seconds_count") == 1
    assert value("vllm:kv_cache_usage_perc", {"model_name": "tiny"}) == 16 / 64
    link.on_closed("gone")
    assert value("tandem_router_workers_lost_total", {"role": "decode"}) == 1
    assert value("tandem_router_workers", {"role": "decode", "life": "ready"}) == 0
    again = replace(WORKER, ref=WorkerRef("decode-0", "b"))
    dispatcher.announce(again, WorkerLoad())
    dispatcher._links[again.ref].on_open()  # type: ignore[attr-defined]
    assert value("tandem_router_replans_total") == 1
    assert value("tandem_router_queue_seconds_count") == 1  # once a request
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_a_request_that_a_silent_worker_has_ends_at_another_one_and_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "WorkerLink", StubLink)
    registry = CollectorRegistry()
    dispatcher = live_dispatcher(registry)
    dispatcher.apply(Policy(routing=RoutingPolicy(hedge=HedgePolicy(after_s=0.01))))
    links: list[Any] = []
    for name in ("decode-0", "decode-1"):
        info = replace(WORKER, ref=WorkerRef(name, "a"))
        dispatcher.announce(info, WorkerLoad())
        links.append(dispatcher._links[info.ref])
        links[-1].on_open()
    ticks = asyncio.ensure_future(dispatcher.tick_forever(interval_s=0.005))
    stream = dispatcher.generate(REQUEST, Placement.AUTO)
    first = asyncio.ensure_future(anext(stream))
    try:
        async with asyncio.timeout(10):
            starts: list[StartGeneration] = []
            while len(starts) < 2:
                await asyncio.sleep(0.001)
                starts = [item for link in links for item in link.sent if isinstance(item, StartGeneration)]
            silent, other = links if links[0].sent[-1].request.request_id.endswith(".1") else links[::-1]
            attempt_id = other.sent[-1].request.request_id
            other.on_answer(StepOutput((TokenDelta(attempt_id, 0, (7,), FinishReason.LENGTH),), WorkerLoad()))
            assert (await first).token_ids == (7,)
    finally:
        ticks.cancel()
        await stream.aclose()
    assert isinstance(silent.sent[-1], CancelRequest) and dispatcher.num_open == 0
    outcomes = {"begun": 1, "won": 1, "lost": 0}
    for outcome, number in outcomes.items():
        assert registry.get_sample_value("tandem_router_hedges_total", {"outcome": outcome}) == number
    assert registry.get_sample_value("tandem_router_replans_total") == 0
