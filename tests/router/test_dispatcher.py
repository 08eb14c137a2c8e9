"""One request's way through the workers, told step by step; and any order of answers, losses and cancels."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import BadRequest, Rejected, RejectReason, TransferFailed, WorkerLost
from core.handoff import HandoffTicket
from core.identity import KEY_BYTES, Adapter
from core.membership import GivenWork, Role, WorkerLoad, WorkerRef
from core.messages import (
    CacheEvents,
    CancelRequest,
    PeerConnected,
    Refused,
    RefuseReason,
    ReserveBlocks,
    Reserved,
    ResyncCache,
    StartGeneration,
    StartPrefill,
    StepOutput,
)
from core.request import (
    FinishReason,
    GenerateRequest,
    Placement,
    SamplingParams,
    StopConditions,
    TokenDelta,
    WorkUsage,
)
from router.admission.policy import AdmissionPolicy, QueuePolicy
from router.admission.room import PromptsOut
from router.config import DispatcherConfig
from router.dispatcher import Dispatcher
from router.effects import Deliver, Effect, Fail, Planned, Send
from router.flow import Flow, Output
from router.policy.choose import PlanReason
from router.view import ClusterView
from tests.worker_info import worker_info

IDLE = WorkerLoad()


class Cluster:
    """A dispatcher and its workers' half of the talk, by hand."""

    def __init__(self, *names: str, **config) -> None:
        self.view = ClusterView()
        self.dispatcher = Dispatcher(DispatcherConfig(**config), self.view, "x")
        self.refs: dict[str, WorkerRef] = {}
        for name in names:
            self.join(name)

    def join(
        self, name: str, life: str = "1", num_blocks: int = 100, adapters: frozenset[Adapter] = frozenset()
    ) -> list[Effect]:
        role = Role.PREFILL if name.startswith("p") else Role.DECODE
        ref = WorkerRef(name, life)
        info = worker_info(ref, role, num_blocks=num_blocks, adapters=adapters)
        self.view.register(info, now=0.0)
        self.view.ready(ref)
        self.refs[name] = ref
        effects = self.dispatcher.serve_queue(0.0)
        for other in self.refs.values():
            if other != ref:
                effects += self.dispatcher.answered(ref, PeerConnected(other, "cma", 1.0), 0.0)
                effects += self.dispatcher.answered(other, PeerConnected(ref, "cma", 1.0), 0.0)
        return effects

    def disconnect(self, name: str) -> None:
        worker = self.view.get(self.refs[name])
        for slot in list(worker.links):
            worker.unlink(slot)
            self.view.at(slot).unlink(worker.slot)
        self.view._ready = None

    def submit(
        self, name: str = "r", placement: Placement = Placement.AUTO, now: float = 0.0, num_choices: int = 1
    ) -> list[Effect]:
        return self.dispatcher.submit(request(name, num_choices), placement, now)

    def say(self, name: str, *deltas: TokenDelta, now: float = 0.0) -> list[Effect]:
        return self.dispatcher.answered(self.refs[name], StepOutput(deltas, IDLE), now)

    def reserved(self, attempt: str = "r#x.1", decode: str = "d1", now: float = 0.0) -> list[Effect]:
        ticket = HandoffTicket(attempt, self.refs[decode], 1, 0, (1, 2))
        return self.dispatcher.answered(self.refs[decode], Reserved(attempt, ticket), now)

    def assert_idle(self) -> None:
        assert self.dispatcher.num_open == 0
        assert self.dispatcher._books.attempts == {}
        admission = self.dispatcher.admission
        assert (len(admission.line), admission.line.backlog, admission.out) == (0, 0, PromptsOut())
        assert self.dispatcher.num_queued == 0
        for worker in self.view.workers():
            assert (worker.open_tokens, worker.prefills.num_tokens) == (0, 0)


def request(name: str = "r", num_choices: int = 1) -> GenerateRequest:
    stop = StopConditions(max_tokens=8)
    return GenerateRequest(name, tuple(range(20)), SamplingParams(0.0), stop, num_choices=num_choices)


def delta(
    position: int, *tokens: int, attempt: str = "r#x.1", finish: FinishReason | None = None, choice: int = 0
) -> TokenDelta:
    return TokenDelta(attempt, position, tokens, finish, choice=choice)


def commands(effects: list[Effect]) -> list[object]:
    return [effect.command for effect in effects if isinstance(effect, Send)]


def delivered(effects: list[Effect]) -> list[tuple[int, tuple[int, ...]]]:
    return [(effect.delta.position, effect.delta.token_ids) for effect in effects if isinstance(effect, Deliver)]


def by_choice(effects: list[Effect]) -> dict[int, list[int]]:
    found: defaultdict[int, list[int]] = defaultdict(list)
    for effect in effects:
        if isinstance(effect, Deliver):
            found[effect.delta.choice] += effect.delta.token_ids
    return found


def planned_on(effects: list[Effect]) -> list[tuple[str, str | None]]:
    """(decode, prefill) of each plan."""
    plans = [effect.plan for effect in effects if isinstance(effect, Planned)]
    return [(plan.decode.worker_id, plan.prefill and plan.prefill.worker_id) for plan in plans]


def failure(effects: list[Effect]) -> Exception:
    (fail,) = [effect for effect in effects if isinstance(effect, Fail)]
    return fail.error


def test_a_request_is_reserved_prefilled_and_decoded() -> None:
    cluster = Cluster("p1", "d1")
    planned, send = cluster.submit()
    assert isinstance(planned, Planned) and planned.plan.reason is PlanReason.PREFILL_POOL
    assert isinstance(send, Send) and isinstance(send.command, ReserveBlocks)
    assert (send.worker, send.command.source, send.command.handoff_id) == (
        cluster.refs["d1"], cluster.refs["p1"], "r#x.1",
    )  # fmt: skip
    (prefill,) = commands(cluster.reserved())
    assert isinstance(prefill, StartPrefill) and prefill.ticket.block_ids == (1, 2)
    assert delivered(cluster.say("p1", delta(0, 50))) == [(0, (50,))]
    assert delivered(cluster.say("d1", delta(1, 51))) == [(1, (51,))]
    last = cluster.say("d1", delta(2, 52, finish=FinishReason.LENGTH))
    assert delivered(last) == [(2, (52,))]
    assert commands(last) == []
    cluster.assert_idle()


def test_decode_that_overtakes_the_first_token_is_held_back() -> None:
    cluster = Cluster("p1", "d1")
    cluster.submit()
    cluster.reserved()
    assert delivered(cluster.say("d1", delta(1, 51), delta(2, 52))) == []
    assert delivered(cluster.say("p1", delta(0, 50))) == [(0, (50,)), (1, (51,)), (2, (52,))]


def test_each_position_is_delivered_once() -> None:
    cluster = Cluster("d1")
    cluster.submit()
    assert delivered(cluster.say("d1", delta(0, 50), delta(0, 50))) == [(0, (50,))]
    assert delivered(cluster.say("d1", delta(0, 50), delta(1, 51))) == [(1, (51,))]


def test_a_first_token_that_ends_the_request_recalls_decode() -> None:
    cluster = Cluster("p1", "d1")
    cluster.submit()
    cluster.reserved()
    effects = cluster.say("p1", delta(0, 50, finish=FinishReason.STOP))
    assert delivered(effects) == [(0, (50,))]
    assert [(effect.worker, effect.command) for effect in effects if isinstance(effect, Send)] == [
        (cluster.refs["d1"], CancelRequest("r#x.1"))
    ]
    cluster.assert_idle()


@pytest.mark.parametrize("reason", [FinishReason.DEAD_END, FinishReason.ERROR])
@pytest.mark.parametrize("who", ["p1", "d1"])
def test_a_dead_end_ends_the_request_on_every_worker(who: str, reason: FinishReason) -> None:
    """It has no token: the prefill worker pushes nothing then, and decode waits for no more. Nor is it tried again:
    the next worker would come to the same."""
    cluster = Cluster("p1", "d1")
    cluster.submit()
    cluster.reserved()
    effects = [] if who == "p1" else cluster.say("p1", delta(0, 5))
    assert commands(effects) == []
    effects = cluster.say(who, delta(0 if who == "p1" else 1, finish=reason))
    assert set(commands(effects)) == {CancelRequest("r#x.1")}
    assert [(effect.delta.finish_reason, effect.last) for effect in effects if isinstance(effect, Deliver)] == [
        (reason, True)
    ]
    cluster.assert_idle()


def test_a_request_ends_with_the_last_of_its_choices() -> None:
    """Choice 1 ends with its first token, which decode sees itself when the KV lands; nothing is recalled."""
    cluster = Cluster("p1", "d1")
    cluster.submit(num_choices=3)
    cluster.reserved()
    firsts = [delta(0, 50), delta(0, 60, choice=1, finish=FinishReason.STOP), delta(0, 70, choice=2)]
    overtaking = cluster.say("d1", delta(1, 71, choice=2, finish=FinishReason.LENGTH))
    assert delivered(overtaking) == []
    effects = cluster.say("p1", *firsts)
    assert by_choice(effects) == {0: [50], 1: [60], 2: [70, 71]}
    assert commands(effects) == []
    assert cluster.dispatcher.num_open == 1
    assert by_choice(cluster.say("d1", delta(1, 61, choice=1), delta(1, 51))) == {0: [51]}
    last = cluster.say("d1", delta(2, 52, finish=FinishReason.LENGTH))
    assert by_choice(last) == {0: [52]}
    assert commands(last) == []
    cluster.assert_idle()


def test_first_tokens_that_end_every_choice_recall_decode() -> None:
    cluster = Cluster("p1", "d1")
    cluster.submit(num_choices=2)
    cluster.reserved()
    assert commands(cluster.say("p1", delta(0, 50, choice=1, finish=FinishReason.STOP))) == []
    assert commands(cluster.say("p1", delta(0, 50, finish=FinishReason.STOP))) == [CancelRequest("r#x.1")]
    cluster.assert_idle()


def test_a_choice_that_breaks_ends_the_others() -> None:
    cluster = Cluster("d1")
    cluster.submit(num_choices=2)
    cluster.say("d1", delta(0, 50), delta(0, 60, choice=1))
    broken = cluster.say("d1", delta(1, 61, choice=1, finish=FinishReason.ERROR))
    assert by_choice(broken) == {1: [61]}
    assert commands(broken) == [CancelRequest("r#x.1")]
    cluster.assert_idle()


def starts(effects: list[Effect]) -> list[GenerateRequest]:
    """What decode workers were asked to generate."""
    return [command.request for command in commands(effects) if isinstance(command, StartGeneration | ReserveBlocks)]


def test_choices_that_are_out_go_on_one_by_one_and_those_that_ended_do_not() -> None:
    cluster = Cluster("d1", "d2")
    [planned, _send] = cluster.submit(num_choices=3)
    assert isinstance(planned, Planned)
    lost = planned.plan.decode
    cluster.say(lost.worker_id, delta(0, 50, choice=1), delta(1, 51, choice=1))
    cluster.say(lost.worker_id, delta(0, 60, choice=2, finish=FinishReason.STOP))
    effects = cluster.dispatcher.worker_lost(lost, 0.0)
    first, second = starts(effects)
    assert [item.output_token_ids for item in (first, second)] == [(), (50, 51)]
    sampling = request("r").sampling
    assert [item.sampling for item in (first, second)] == [sampling.for_choice(0), sampling.for_choice(1)]
    [other] = {effect.worker.worker_id for effect in effects if isinstance(effect, Send)}
    assert other != lost.worker_id
    said = cluster.say(other, delta(2, 52, attempt=second.request_id, finish=FinishReason.LENGTH))
    assert [(item.delta.choice, item.delta.position) for item in said if isinstance(item, Deliver)] == [(1, 2)]
    cluster.say(other, delta(0, 40, attempt=first.request_id, finish=FinishReason.LENGTH))
    cluster.assert_idle()


def test_a_choice_that_goes_on_and_is_lost_again_draws_as_it_did_before() -> None:
    cluster = Cluster("d1")
    cluster.submit(num_choices=2)
    cluster.say("d1", delta(0, 50, choice=1), delta(0, 60, choice=0, finish=FinishReason.STOP))
    for life, position in (("2", 1), ("3", 2)):
        cluster.dispatcher.worker_lost(cluster.refs["d1"], 0.0)
        [again] = starts(cluster.join("d1", life=life))
        assert again.sampling == request("r").sampling.for_choice(1)
        assert len(again.output_token_ids) == position
        cluster.say("d1", delta(position, 51, attempt=again.request_id))


@pytest.mark.parametrize(
    ("workers", "placement", "kind", "reason"),
    [
        (("p1", "d1"), Placement.LOCAL, StartGeneration, PlanReason.ASKED),
        (("p1", "d1"), Placement.REMOTE, ReserveBlocks, PlanReason.ASKED),
        (("d1",), Placement.AUTO, StartGeneration, PlanReason.NO_PREFILL_WORKER),
    ],
)
def test_placement(workers, placement, kind, reason) -> None:
    planned, send = Cluster(*workers).submit(placement=placement)
    assert isinstance(send, Send) and isinstance(send.command, kind)
    assert isinstance(planned, Planned) and planned.plan.reason is reason


def test_remote_waits_for_a_prefill_worker_and_is_served_when_one_is_paired() -> None:
    cluster = Cluster("d1")
    assert cluster.submit(placement=Placement.REMOTE) == []
    assert any(isinstance(command, ReserveBlocks) for command in commands(cluster.join("p1")))


def prefilled_by(effects: list[Effect]) -> str:
    planned = effects[0]
    assert isinstance(planned, Planned)
    return (planned.plan.prefill or planned.plan.decode).worker_id


def test_prompts_that_queue_are_shared_with_the_decode_worker_in_the_stated_measure() -> None:
    cluster = Cluster("p1", "d1", local_prefill_cost=2.0)
    chosen = [prefilled_by(cluster.submit(f"r{number}")) for number in range(9)]
    assert chosen == ["p1", "p1", "d1", "p1", "p1", "d1", "p1", "p1", "d1"]
    assert {planned.plan.reason for planned in cluster.submit("last") if isinstance(planned, Planned)} == {
        PlanReason.PREFILL_POOL
    }


def test_a_measure_without_end_never_prefills_on_a_decode_worker() -> None:
    cluster = Cluster("p1", "d1", local_prefill_cost=math.inf)
    assert {prefilled_by(cluster.submit(f"r{number}")) for number in range(20)} == {"p1"}
    with pytest.raises(BadRequest, match="local_prefill_cost"):
        DispatcherConfig(local_prefill_cost=0.5)
    with pytest.raises(BadRequest, match="local_prefill_cost"):
        DispatcherConfig(local_prefill_cost=math.nan)


def test_who_asks_for_a_prefill_worker_gets_it_however_long_the_queue() -> None:
    cluster = Cluster("p1", "d1", local_prefill_cost=1.0)
    assert {prefilled_by(cluster.submit(f"r{n}", Placement.REMOTE)) for n in range(5)} == {"p1"}
    assert prefilled_by(cluster.submit("free")) == "d1"


def test_a_prompt_that_is_computed_or_cancelled_is_no_longer_waited_for() -> None:
    cluster = Cluster("p1", "d1", local_prefill_cost=2.0)
    for number in range(2):
        cluster.submit(f"r{number}", Placement.REMOTE)
    assert prefilled_by(cluster.submit("queued")) == "d1"
    cluster.dispatcher.cancel("queued", 0.0)
    cluster.dispatcher.cancel("r1", 0.0)
    cluster.reserved("r0#x.1")
    cluster.say("p1", delta(0, 50, attempt="r0#x.1"))
    assert prefilled_by(cluster.submit("now")) == "p1"


@pytest.mark.parametrize(("took_s", "expected"), [(0.1, "p1"), (1.0, "d1")])
def test_the_pace_of_each_side_is_learnt_from_its_first_tokens(took_s: float, expected: str) -> None:
    """The decode worker takes 0.2 s for such a prompt; what the prefill worker takes decides."""
    cluster = Cluster("p1", "d1", local_prefill_cost=2.0)
    long = replace(request("local"), prompt_token_ids=tuple(range(100)))
    cluster.dispatcher.submit(long, Placement.LOCAL, 0.0)
    cluster.say("d1", delta(0, 50, attempt="local#x.1"), now=0.2)
    cluster.dispatcher.submit(replace(long, request_id="remote"), Placement.REMOTE, 1.0)
    cluster.reserved("remote#x.2", now=1.0)
    cluster.say("p1", delta(0, 50, attempt="remote#x.2"), now=1.0 + took_s)
    assert prefilled_by(cluster.submit("next", now=3.0)) == expected


def test_an_unpaired_prefill_worker_is_not_chosen() -> None:
    cluster = Cluster("p1", "d1")
    cluster.disconnect("d1")
    planned, _send = cluster.submit()
    assert isinstance(planned, Planned) and planned.plan.reason is PlanReason.NO_PREFILL_WORKER


@pytest.mark.parametrize("placement", [Placement.AUTO, Placement.REMOTE])
def test_a_decode_worker_that_is_paired_goes_before_an_idler_one_that_is_not_yet(placement: Placement) -> None:
    cluster = Cluster("p1", "d1", "d2")
    cluster.submit("busy", Placement.LOCAL)  # on d1, so that d2 is the idler one
    cluster.disconnect("d2")
    planned = cluster.submit(placement=placement)[0]
    assert isinstance(planned, Planned)
    assert (planned.plan.decode.worker_id, planned.plan.prefill.worker_id) == ("d1", "p1")


def test_load_is_spread_by_what_was_given_out_not_by_reports() -> None:
    cluster = Cluster("p1", "p2", "d1", "d2")
    chosen = []
    for number in range(4):
        planned = cluster.submit(f"r{number}")[0]
        assert isinstance(planned, Planned)
        chosen.append((planned.plan.prefill.worker_id, planned.plan.decode.worker_id))
    assert sorted(chosen) == [("p1", "d1"), ("p1", "d1"), ("p2", "d2"), ("p2", "d2")]


def test_no_worker_is_a_bounded_wait_then_a_rejection_with_its_reason() -> None:
    cluster = Cluster()
    assert cluster.submit() == []
    assert cluster.dispatcher.tick(29.9) == []
    error = failure(cluster.dispatcher.tick(30.0))
    assert isinstance(error, Rejected) and error.reason is RejectReason.NO_WORKER
    cluster.assert_idle()


def test_a_request_goes_to_workers_with_its_adapter_and_waits_for_one_and_is_told() -> None:
    poet = Adapter("poet", "d1")

    def ask(cluster: Cluster, now: float = 0.0) -> list[Effect]:
        return cluster.dispatcher.submit(replace(request(), adapter=poet), Placement.AUTO, now)

    cluster = Cluster("p1", "d1")
    cluster.join("d2", adapters=frozenset({Adapter("poet", "d2")}))  # other content
    assert planned_on(cluster.submit("base")) == [("d1", "p1")]
    assert ask(cluster) == []
    assert cluster.dispatcher.tick(29.9) == []
    error = failure(cluster.dispatcher.tick(30.0))
    assert isinstance(error, Rejected) and error.reason is RejectReason.NO_ADAPTER and "'poet'" in str(error)
    ask(cluster)
    assert planned_on(cluster.join("d3", adapters=frozenset({poet}))) == [("d3", None)]
    cluster.dispatcher.cancel("r", 0.0)
    assert planned_on(ask(cluster)) == [("d3", None)]  # p1 has a path to it, but not the adapter
    cluster.dispatcher.cancel("r", 0.0)
    cluster.join("p2", adapters=frozenset({poet, Adapter("clerk", "d3")}))
    effects = ask(cluster)
    assert planned_on(effects) == [("d3", "p2")]
    (reserve,) = commands(effects)
    assert isinstance(reserve, ReserveBlocks) and reserve.request.adapter == poet
    cluster.dispatcher.worker_lost(cluster.refs["d1"], 0.0)
    cluster.reserved(reserve.request.request_id, "d3")
    cluster.say("p2", delta(0, 7, attempt=reserve.request.request_id))
    cluster.join("d4", adapters=frozenset({poet}))
    moved = cluster.dispatcher.worker_lost(cluster.refs["d3"], 0.0)
    assert planned_on(moved) == [("d4", "p2")]
    (again,) = [item for item in commands(moved) if isinstance(item, ReserveBlocks)]
    assert (again.request.adapter, again.request.output_token_ids) == (poet, (7,))


def test_where_workers_have_neither_come_nor_gone_an_adapter_that_nobody_has_is_refused_at_once() -> None:
    poet, other = Adapter("poet", "d1"), Adapter("poet", "d2")

    def ask(name: str, now: float, adapter: Adapter = poet) -> list[Effect]:
        asked = replace(request(name), adapter=adapter)
        return cluster.dispatcher.submit(asked, Placement.AUTO, now)

    cluster = Cluster("p1", "d1")
    cluster.join("d2", adapters=frozenset({other}))
    ask("early", 30.0)  # one that has it may be on its way
    with pytest.raises(Rejected, match=r"no_adapter.*'poet'"):
        ask("late", 30.1)
    assert planned_on(ask("other", 30.1, other)) == [("d2", None)]
    cluster.dispatcher.worker_lost(cluster.refs["d2"], 40.0)
    ask("poet", 70.0)  # whoever replaces it may have another adapter
    ask("other again", 70.0, other)
    for adapter in (poet, other):
        with pytest.raises(Rejected, match="no_adapter"):
            ask("late", 70.1, adapter)
    starting = worker_info(WorkerRef("d3", "1"), adapters=frozenset({poet}))
    cluster.view.register(starting, now=80.0)
    cluster.dispatcher.tick(190.0)
    ask("starting", 200.0)
    error = failure(cluster.dispatcher.tick(230.0))
    assert isinstance(error, Rejected) and error.reason is RejectReason.NO_ADAPTER


def test_full_is_a_rejection_and_one_fewer_is_not() -> None:
    cluster = Cluster("d1", max_open_requests=1)
    cluster.submit("r1")
    with pytest.raises(Rejected, match="queue_full"):
        cluster.submit("r2")
    cluster.dispatcher.cancel("r1", 0.0)
    assert cluster.submit("r2")


def test_an_id_in_use_is_refused() -> None:
    cluster = Cluster("d1")
    cluster.submit()
    with pytest.raises(BadRequest, match="request_id"):
        cluster.submit()


@pytest.mark.parametrize("stage", ["queued", "reserving", "prefilling", "decoding"])
def test_a_cancel_reaches_every_worker_that_holds_something(stage: str) -> None:
    cluster = Cluster(*(() if stage == "queued" else ("p1", "d1")))
    cluster.submit()
    if stage in ("prefilling", "decoding"):
        cluster.reserved()
    if stage == "decoding":
        cluster.say("p1", delta(0, 50))
    told = {effect.worker.worker_id for effect in cluster.dispatcher.cancel("r", 0.0) if isinstance(effect, Send)}
    assert told == {"queued": set(), "decoding": {"d1"}}.get(stage, {"d1", "p1"})
    cluster.assert_idle()


def test_a_request_id_may_be_used_again_and_hears_nothing_of_its_past() -> None:
    cluster = Cluster("d1")
    first = cluster.submit()[0]
    cluster.dispatcher.cancel("r", 0.0)
    second = cluster.submit()[0]
    assert isinstance(first, Planned) and isinstance(second, Planned)
    assert first.attempt_id != second.attempt_id
    assert delivered(cluster.say("d1", delta(0, 9, attempt=first.attempt_id))) == []
    assert delivered(cluster.say("d1", delta(0, 9, attempt=second.attempt_id))) == [(0, (9,))]


@pytest.mark.parametrize("dead", ["p1", "d1"])
def test_a_worker_lost_before_the_first_token_is_planned_again_elsewhere(dead: str) -> None:
    cluster = Cluster("p1", "d1", "p2", "d2")
    planned = cluster.submit()[0]
    assert isinstance(planned, Planned)
    lost = planned.plan.prefill if dead == "p1" else planned.plan.decode
    effects = cluster.dispatcher.worker_lost(lost, 0.0)
    again = next(effect for effect in effects if isinstance(effect, Planned))
    assert again.attempt == 2
    assert lost not in (again.plan.prefill, again.plan.decode)
    assert delivered(cluster.say(again.plan.prefill.worker_id, delta(0, 9, attempt="r#x.1"))) == []


def test_a_decode_worker_lost_after_the_first_token_is_continued_from_the_latest_one() -> None:
    cluster = Cluster("p1", "d1", "d2")
    planned = cluster.submit()[0]
    assert isinstance(planned, Planned)
    lost = planned.plan.decode
    cluster.reserved(decode=lost.worker_id)
    cluster.say("p1", delta(0, 50))
    cluster.say(lost.worker_id, delta(1, 51), delta(3, 53))  # the last one overtook a token that never came
    effects = cluster.dispatcher.worker_lost(lost, 0.0)
    assert not any(isinstance(effect, Fail) for effect in effects)
    [again] = starts(effects)
    assert (again.prompt_token_ids, again.output_token_ids) == (request().prompt_token_ids, (50, 51))
    other = {"d1": "d2", "d2": "d1"}[lost.worker_id]
    cluster.reserved(again.request_id, decode=other)
    assert delivered(cluster.say("p1", delta(2, 52, attempt=again.request_id))) == [(2, (52,))]
    assert delivered(cluster.say(other, delta(3, 54, attempt=again.request_id))) == [(3, (54,))]
    cluster.dispatcher.cancel("r", 0.0)
    cluster.assert_idle()


def test_a_stream_waits_for_a_worker_and_ends_with_an_error_only_when_none_comes() -> None:
    cluster = Cluster("d1", queue_timeout_s=5.0)
    cluster.submit()
    cluster.say("d1", delta(0, 50))
    assert cluster.dispatcher.worker_lost(cluster.refs["d1"], 10.0) == []
    assert cluster.dispatcher.tick(14.9) == []
    assert isinstance(failure(cluster.dispatcher.tick(15.0)), Rejected)
    cluster.assert_idle()


def test_a_request_that_kills_every_worker_ends() -> None:
    """With a token each time, or without one."""
    for talks, most in ((True, 5), (False, 3)):
        cluster = Cluster("d1", max_silent_failures=3, max_failures=4)
        [item] = starts(cluster.submit())
        kills, effects = 0, []
        while not any(isinstance(effect, Fail) for effect in effects):
            if talks:
                cluster.say("d1", delta(kills, 50, attempt=item.request_id))
            effects = cluster.dispatcher.worker_lost(cluster.refs["d1"], 0.0)
            kills += 1
            joined = cluster.join("d1", life=str(kills + 1))
            item = next(iter(starts(effects + joined)), item)
        assert kills == most
        cluster.assert_idle()


def test_a_request_is_not_blamed_for_workers_that_did_not_compute_it() -> None:
    """However often: before the reserve is answered, and while its prompt is computed elsewhere."""
    cluster = Cluster("p1", "d1", max_silent_failures=1)
    [reserve] = commands(cluster.submit(placement=Placement.REMOTE))
    for life in range(2, 8):
        if life % 2:
            cluster.reserved(reserve.handoff_id)
        lost = cluster.dispatcher.worker_lost(cluster.refs["d1"], 0.0)
        assert not any(isinstance(effect, Fail) for effect in lost)
        [reserve] = commands(cluster.join("d1", life=str(life)))
    cluster.reserved(reserve.handoff_id)
    assert isinstance(failure(cluster.dispatcher.worker_lost(cluster.refs["p1"], 0.0)), WorkerLost)
    cluster.assert_idle()


def test_a_request_is_not_blamed_for_its_workers_deaths_while_others_die_as_often_without_it() -> None:
    for others_die in (True, False):
        cluster = Cluster("d1", "d2", max_silent_failures=3)
        planned = cluster.submit()[0]
        kills = 0
        while isinstance(planned, Planned) and kills < 20:
            name = planned.plan.decode.worker_id
            other = {"d1": "d2", "d2": "d1"}[name]
            effects = cluster.dispatcher.worker_lost(cluster.refs[name], 0.0)
            kills += 1
            cluster.join(name, life=f"{kills}.1")
            planned = effects[0] if not isinstance(effects[0], Send) else effects[1]
            if others_die:
                without = name if isinstance(planned, Planned) and planned.plan.decode.worker_id == other else other
                cluster.dispatcher.worker_lost(cluster.refs[without], 0.0)
                cluster.join(without, life=f"{kills}.2")
        assert kills == (20 if others_die else 3)


def test_of_many_prompts_at_a_worker_that_dies_only_those_that_it_can_have_begun_are_blamed() -> None:
    """One that kills has been begun at each death, so that it is stopped all the same."""
    cluster = Cluster("d1", max_silent_failures=2, tokens_ahead=40)
    cluster.dispatcher.admission.policy = AdmissionPolicy(queue=QueuePolicy(tokens_ahead=10_000))
    for number in range(5):
        assert planned_on(cluster.submit(f"r{number}")) == [("d1", None)]
    left = []
    for kill in range(5):
        cluster.dispatcher.worker_lost(cluster.refs["d1"], 0.0)
        cluster.join("d1", life=str(kill + 2))
        left.append(list(cluster.dispatcher._open.flows))
    rest = ["r2", "r3", "r4"]
    assert left[1:] == [rest, rest, ["r4"], ["r4"]] and len(left[0]) == 5


@pytest.mark.parametrize(("priority", "alone"), [(1, False), (0, False), (1, True)])
def test_a_prompt_that_kills_is_stopped_also_beside_a_long_one(priority: int, alone: bool) -> None:
    """Batch work that was there first, or what shares a step with the long one's last chunk; another long one follows
    each that fails."""
    cluster = Cluster()
    cluster.join("d1", num_blocks=10_000)

    def submit(name: str, num_tokens: int, priority: int = 0) -> None:
        prompt = replace(request(name), prompt_token_ids=tuple(range(num_tokens)), priority=priority)
        cluster.dispatcher.submit(prompt, Placement.AUTO, 0.0)

    submit("poison", 500, priority)
    deaths, flows = 0, cluster.dispatcher._open.flows
    while "poison" in flows and deaths < 20:
        if not alone and not any(name.startswith("long") for name in flows):
            submit(f"long{deaths}", 2000)
        cluster.dispatcher.worker_lost(cluster.refs["d1"], float(deaths))
        deaths += 1
        cluster.join("d1", life=str(deaths + 1), num_blocks=10_000)
    assert deaths <= DispatcherConfig().max_silent_failures


def test_requests_that_kill_workers_in_turn_do_not_excuse_each_other_for_ever() -> None:
    one, other = (Flow(request(name), Placement.AUTO, (), 0.0, 1.0, [Output()]) for name in ("one", "other"))
    most, kills = DispatcherConfig().max_silent_failures, 0
    while max(one.num_silent_failures, other.num_silent_failures) < most and kills < 200:
        kills += 1
        one.blame(has_talked=False)
        other.pardon()
        one, other = other, one
    assert most < kills < 150


def test_a_prefill_worker_lost_after_its_first_token_ends_nothing() -> None:
    cluster = Cluster("p1", "d1")
    cluster.submit()
    cluster.reserved()
    cluster.say("p1", delta(0, 50))
    assert cluster.dispatcher.worker_lost(cluster.refs["p1"], 0.0) == []
    assert delivered(cluster.say("d1", delta(1, 51))) == [(1, (51,))]


def test_refusals() -> None:
    for reason, kind in (
        (RefuseReason.BAD_REQUEST, BadRequest),
        (RefuseReason.NO_BLOCKS, Rejected),
    ):
        cluster = Cluster("d1")
        cluster.submit()
        refused = cluster.dispatcher.answered(cluster.refs["d1"], Refused("r#x.1", reason, "why"), 30.0)
        assert isinstance(failure(refused), kind)
        cluster.assert_idle()


@pytest.mark.parametrize(("priority", "has_talked", "waits"), [(0, False, False), (1, False, True), (0, True, True)])
def test_where_a_pool_has_no_room_a_stream_waits_on_and_batch_work_as_long_as_for_its_turn(
    priority: int, has_talked: bool, waits: bool
) -> None:
    cluster, attempt = Cluster("p1", "d1"), "r#x.1"
    cluster.dispatcher.submit(replace(request(), priority=priority), Placement.AUTO, 0.0)
    if has_talked:
        cluster.reserved()
        cluster.say("p1", delta(0, 7))
        cluster.join("d2")
        moved = cluster.dispatcher.worker_lost(cluster.refs["d1"], 1.0)
        assert planned_on(moved) == [("d2", "p1")]
        attempt = "r#x.2"
    decode = cluster.refs["d2" if has_talked else "d1"]
    no_room = Refused(attempt, RefuseReason.NO_BLOCKS, "no room in the KV pool for 30 s")
    effects = cluster.dispatcher.answered(decode, no_room, 31.0)
    if not waits:
        error = failure(effects)
        assert isinstance(error, Rejected) and error.reason is RejectReason.QUEUE_TIMEOUT
        cluster.assert_idle()
        return
    assert planned_on(effects) == [(decode.worker_id, "p1")] and CancelRequest(attempt) in commands(effects)
    again = attempt[:-1] + str(int(attempt[-1]) + 1)
    no_room = replace(no_room, request_id=again)
    assert bool(planned_on(cluster.dispatcher.answered(decode, no_room, 301.0))) is has_talked


def test_a_failed_transfer_is_planned_again_until_attempts_run_out() -> None:
    cluster = Cluster("p1", "d1", max_silent_failures=2)
    cluster.submit()
    cluster.reserved()
    first = cluster.dispatcher.answered(cluster.refs["d1"], Refused("r#x.1", RefuseReason.TRANSFER_FAILED, "x"), 0.0)
    assert CancelRequest("r#x.1") in commands(first)
    second = cluster.dispatcher.answered(cluster.refs["d1"], Refused("r#x.2", RefuseReason.TRANSFER_FAILED, "x"), 0.0)
    assert isinstance(failure(second), TransferFailed)
    cluster.assert_idle()


@pytest.mark.parametrize(("placement", "last"), [(Placement.AUTO, StartGeneration), (Placement.REMOTE, ReserveBlocks)])
def test_after_two_failed_hand_offs_a_prompt_that_is_left_to_us_is_computed_where_it_is_decoded(
    placement: Placement, last: type
) -> None:
    cluster = Cluster("p1", "d1")
    cluster.submit(placement=placement)
    effects: list[Effect] = []
    for attempt in ("r#x.1", "r#x.2"):
        assert not any(isinstance(command, StartGeneration) for command in commands(effects))
        cluster.reserved(attempt)
        refused = Refused(attempt, RefuseReason.TRANSFER_FAILED, "x")
        effects = cluster.dispatcher.answered(cluster.refs["d1"], refused, 0.0)
    assert isinstance(commands(effects)[-1], last)


def test_a_draining_worker_takes_nothing_new_and_its_refusal_is_planned_elsewhere() -> None:
    cluster = Cluster("d1", "d2")
    planned = cluster.submit()[0]
    assert isinstance(planned, Planned)
    first = planned.plan.decode
    again = cluster.dispatcher.answered(first, Refused("r#x.1", RefuseReason.DRAINING), 0.0)
    assert [effect.plan.decode for effect in again if isinstance(effect, Planned)] != [first]
    assert all(
        isinstance(effect, Send) or effect.plan.decode != first
        for effect in cluster.submit("next")
        if isinstance(effect, Planned | Send)
    )


def test_a_lost_worker_is_taken_back_with_clean_books_and_a_dead_one_never() -> None:
    cluster = Cluster("d1")
    cluster.submit()
    cluster.dispatcher.worker_lost(cluster.refs["d1"], 0.0)
    planned = cluster.join("d1", life="1")[0]
    assert isinstance(planned, Planned) and planned.attempt_id == "r#x.2"
    assert cluster.say("d1", delta(0, 5, attempt="r#x.1")) == []  # of before
    cluster.say("d1", delta(0, 5, attempt="r#x.2", finish=FinishReason.STOP))
    cluster.assert_idle()
    cluster.view.bury(cluster.refs["d1"])
    with pytest.raises(BadRequest, match="dead"):
        cluster.join("d1", life="1")
    cluster.join("d1", life="2")


def test_what_other_routers_gave_counts_like_our_own() -> None:
    cluster = Cluster("d1", "d2")
    decode = cluster.refs["d1"]
    cluster.dispatcher.answered(decode, StepOutput((), IDLE, GivenWork(1, 500, 500)), 0.0)
    assert planned_on(cluster.submit("a")) == [("d2", None)]
    assert planned_on(cluster.submit("b")) == [("d2", None)]
    cluster.dispatcher.answered(decode, StepOutput((), IDLE, GivenWork()), 0.0)
    assert planned_on(cluster.submit("c")) == [("d1", None)]


def test_prompts_of_other_routers_make_a_prefill_worker_busy() -> None:
    cluster = Cluster("p1", "d1")
    prefill = cluster.refs["p1"]
    assert planned_on(cluster.submit("a")) == [("d1", "p1")]
    cluster.dispatcher.answered(prefill, StepOutput((), IDLE, GivenWork(1, 500, 0)), 0.0)
    assert planned_on(cluster.submit("b")) == [("d1", "p1")]  # their prompts are done
    cluster.dispatcher.answered(prefill, StepOutput((), IDLE, GivenWork(1, 500, 500)), 0.0)
    assert planned_on(cluster.submit("c")) == [("d1", None)]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_in_any_order_of_answers_losses_and_cancels_nothing_stays_on_the_books(seed: int) -> None:
    rng = random.Random(seed)
    cluster = Cluster("p1", "p2", "d1", "d2")
    seen: defaultdict[tuple[str, int], int] = defaultdict(int)
    open_requests: dict[str, set[int]] = {}  # and the choices that have not ended
    num_choices = {f"r{number}": number % 3 + 1 for number in range(6)}
    attempts = ["never planned"]
    choices_of: dict[str, tuple[int, ...]] = {}  # by attempt
    lives = 1

    def take(effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Deliver):
                output = effect.request_id, effect.delta.choice
                assert effect.delta.position == seen[output]
                seen[output] += len(effect.delta.token_ids)
                if effect.delta.finish_reason is not None:
                    open_requests[effect.request_id].remove(effect.delta.choice)
                if not open_requests[effect.request_id]:
                    del open_requests[effect.request_id]
            elif isinstance(effect, Planned):
                assert effect.attempt_id not in attempts
                attempts.append(effect.attempt_id)
            elif isinstance(effect, Fail):
                assert effect.request_id in open_requests
                del open_requests[effect.request_id]
            elif isinstance(effect, Send):
                assert cluster.view.get(effect.worker) is not None, "a command to a worker that is gone"
                if isinstance(effect.command, StartGeneration | ReserveBlocks):
                    started = effect.command.request
                    name = started.request_id.partition("#")[0]
                    leg = cluster.dispatcher._books.attempts.get(started.request_id)
                    choices_of[started.request_id] = leg.choices if leg is not None else ()
                    for choice in choices_of[started.request_id]:
                        assert len(started.output_token_ids) == seen[name, choice]

    for step in range(120):
        name, worker = f"r{rng.randrange(6)}", rng.choice(["p1", "p2", "d1", "d2"])
        attempt = rng.choice(attempts)
        match rng.randrange(7):
            case 0 if name not in open_requests:
                open_requests[name] = set(range(num_choices[name]))
                for choice in open_requests[name]:
                    seen[name, choice] = 0
                take(cluster.submit(name, rng.choice(list(Placement)), float(step), num_choices[name]))
            case 1:
                take(cluster.reserved(attempt, rng.choice(["d1", "d2"])))
            case 2 | 3:
                name = attempt.partition("#")[0]
                choices = choices_of.get(attempt) or (0,)
                index = rng.randrange(len(choices))
                position = seen[name, choices[index]] + rng.randrange(3)
                finish = rng.choice([None, None, None, FinishReason.LENGTH]) if position < 7 else FinishReason.LENGTH
                take(cluster.say(worker, delta(position, 5, attempt=attempt, finish=finish, choice=index)))
            case 4:
                reason = rng.choice(list(RefuseReason))
                take(cluster.dispatcher.answered(cluster.refs[worker], Refused(attempt, reason), float(step)))
            case 5:
                open_requests.pop(name, None)
                take(cluster.dispatcher.cancel(name, 0.0))
            case 6 if rng.random() < 0.5:
                lives += 1
                take(cluster.dispatcher.worker_lost(cluster.refs[worker], float(step)))
                take(cluster.join(worker, life=str(lives)))
        assert cluster.dispatcher.num_open == len(open_requests)
    take(cluster.dispatcher.tick(1e6))
    assert open_requests == {}
    cluster.assert_idle()


def test_a_request_that_fits_into_no_pool_is_refused_at_once_and_one_that_fits_the_larger_goes_there() -> None:
    cluster = Cluster("p1")
    cluster.join("d1", num_blocks=1)
    with pytest.raises(BadRequest, match=r"max_tokens: .* 28 tokens"):
        cluster.submit()
    cluster.assert_idle()
    cluster.join("d2", num_blocks=2)
    assert [effect.worker for effect in cluster.submit() if isinstance(effect, Send)] == [cluster.refs["d2"]]


def test_a_place_that_loses_worker_after_worker_is_left_alone_and_probed() -> None:
    """Also by its next incarnation; the other one serves meanwhile."""
    cluster = Cluster("d1", "d2")
    for life in ("2", "3", "4"):
        cluster.dispatcher.worker_lost(cluster.refs["d1"], 10.0)
        cluster.join("d1", life=life)
    chosen = [prefilled_by(cluster.submit(f"r{number}", now=10.5)) for number in range(3)]
    assert chosen == ["d2"] * 3
    assert prefilled_by(cluster.submit("probe", now=11.0)) == "d1"
    assert prefilled_by(cluster.submit("other", now=11.0)) == "d2"
    usage = WorkUsage(computed_tokens=20)
    [attempt] = [name for name in cluster.dispatcher._books.attempts if name.startswith("probe#")]
    cluster.say("d1", replace(delta(0, 5, attempt=attempt), usage=usage), now=11.5)
    assert prefilled_by(cluster.submit("again", now=11.5)) == "d1"


def test_a_worker_that_ends_after_a_drain_has_not_failed() -> None:
    cluster = Cluster("d1", "d2")
    for life in ("2", "3", "4"):
        cluster.view.draining(cluster.refs["d1"])
        cluster.dispatcher.worker_lost(cluster.refs["d1"], 10.0)
        cluster.join("d1", life=life)
    assert "d1" in {prefilled_by(cluster.submit(f"r{number}", now=10.5)) for number in range(2)}


def test_a_gap_in_what_a_worker_caches_is_asked_for_once() -> None:
    cluster = Cluster("d1")
    for sequence, asked in ((1, []), (3, [ResyncCache()]), (4, [])):
        events = CacheEvents(sequence, bytes(8), b"", reset=sequence == 1)
        said = cluster.dispatcher.answered(cluster.refs["d1"], StepOutput((), IDLE, cache=events), 0.0)
        assert commands(said) == asked


def test_what_is_cached_takes_no_room_at_the_workers_from_what_is_not() -> None:
    cluster = Cluster("d1", tokens_ahead=20)
    cached = CacheEvents(1, (7).to_bytes(KEY_BYTES, "little"), b"", reset=True)
    cluster.dispatcher.answered(cluster.refs["d1"], StepOutput((), IDLE, cache=cached), 0.0)
    for name, keys in (("hit", (7,)), ("miss", (8,)), ("hit again", (7,))):
        cluster.dispatcher.submit(request(name), Placement.AUTO, 0.0, keys=keys)
    out = cluster.dispatcher.admission.out
    assert (out.num_prompts, out.num_tokens, out.unplaced_tokens) == (2, 4 + 20, 40)  # the third waits
