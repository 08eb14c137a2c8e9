"""A second attempt beside one whose first token does not come, told step by step; walked at random in
tests/simulation/test_hedge_world.py."""

from __future__ import annotations

import pytest

from core.errors import BadRequest
from core.messages import CancelRequest, Refused, RefuseReason, StartGeneration
from core.request import FinishReason, Placement
from router.effects import Effect, Fail, RaceEnded, Send
from router.policy.routing_policy import HedgePolicy, RoutingPolicy
from router.policy_file import parse_policy
from tests.router.test_dispatcher import Cluster, by_choice, delivered, delta, planned_on

AFTER_S = 2.0
FIRST, SECOND = "r#x.1", "r#x.2"


def hedged(*names: str, max_share: float = 1.0, **hedge: float) -> Cluster:
    cluster = Cluster(*names)
    policy = HedgePolicy(after_s=AFTER_S, max_share=max_share, **hedge)
    cluster.dispatcher.planner.routing = RoutingPolicy(hedge=policy)
    return cluster


def cancelled(effects: list[Effect]) -> set[tuple[str, str]]:
    """(worker, attempt)"""
    return {
        (effect.worker.worker_id, effect.command.request_id)
        for effect in effects
        if isinstance(effect, Send) and isinstance(effect.command, CancelRequest)
    }


def races(effects: list[Effect]) -> list[bool]:
    return [effect.won for effect in effects if isinstance(effect, RaceEnded)]


def test_a_late_request_begins_elsewhere_and_the_first_token_ends_the_slower_attempt_on_both_its_workers() -> None:
    cluster = hedged("p1", "p2", "d1", "d2")
    assert planned_on(cluster.submit(placement=Placement.REMOTE)) == [("d1", "p1")]
    cluster.reserved(FIRST)
    assert cluster.dispatcher.tick(AFTER_S - 0.1) == []
    assert planned_on(cluster.dispatcher.tick(AFTER_S)) == [("d2", "p2")]
    assert cluster.dispatcher.tick(AFTER_S * 10) == []  # two are enough
    cluster.reserved(SECOND, "d2", now=3.0)
    first = cluster.say("p2", delta(0, 7, attempt=SECOND), now=3.5)
    assert delivered(first) == [(0, (7,))]
    assert cancelled(first) == {("p1", FIRST), ("d1", FIRST)}
    assert races(first) == [True]
    assert cluster.say("p1", delta(0, 7), now=3.6) == []
    assert delivered(cluster.say("d2", delta(1, 8, attempt=SECOND, finish=FinishReason.LENGTH))) == [(1, (8,))]
    cluster.assert_idle()


def test_the_first_attempt_may_win_by_a_token_that_overtook_its_first() -> None:
    cluster = hedged("p1", "d1", "d2")
    cluster.submit()
    cluster.reserved(FIRST)
    assert planned_on(cluster.dispatcher.tick(AFTER_S)) == [("d2", None)]
    early = cluster.say("d1", delta(1, 8))
    assert cancelled(early) == {("d2", SECOND)} and races(early) == [False] and delivered(early) == []
    assert delivered(cluster.say("p1", delta(0, 7))) == [(0, (7,)), (1, (8,))]
    cluster.dispatcher.cancel("r", 3.0)
    cluster.assert_idle()


def test_choices_race_together() -> None:
    cluster = hedged("d1", "d2")
    cluster.submit(num_choices=2)
    assert planned_on(cluster.dispatcher.tick(AFTER_S)) == [("d2", None)]
    effects = cluster.say("d2", delta(0, 7, attempt=SECOND, choice=1))
    effects += cluster.say("d1", delta(0, 6, choice=0))
    effects += cluster.say("d2", delta(0, 6, attempt=SECOND, choice=0))
    assert by_choice(effects) == {1: [7], 0: [6]}
    cluster.dispatcher.cancel("r", 3.0)
    cluster.assert_idle()


@pytest.mark.parametrize("lost", ["d1", "d2"])
@pytest.mark.parametrize("way", ["dies", "refuses", "fails"])
def test_where_one_attempt_fails_the_other_goes_on(lost: str, way: str) -> None:
    cluster = hedged("d1", "d2")
    cluster.submit()
    cluster.dispatcher.tick(AFTER_S)
    attempts = {"d1": FIRST, "d2": SECOND}
    match way:
        case "dies":
            effects = cluster.dispatcher.worker_lost(cluster.refs[lost], 3.0)
        case "refuses":
            refusal = Refused(attempts[lost], RefuseReason.NO_BLOCKS)
            effects = cluster.dispatcher.answered(cluster.refs[lost], refusal, 3.0)
        case _:
            effects = cluster.say(lost, delta(0, attempt=attempts[lost], finish=FinishReason.ERROR))
    assert not any(isinstance(effect, Fail) for effect in effects)
    assert not any(isinstance(effect, Send) and isinstance(effect.command, StartGeneration) for effect in effects)
    other = {"d1": "d2", "d2": "d1"}[lost]
    assert delivered(cluster.say(other, delta(0, 7, attempt=attempts[other], finish=FinishReason.STOP))) == [(0, (7,))]
    cluster.assert_idle()


def test_a_client_that_leaves_ends_both() -> None:
    cluster = hedged("d1", "d2")
    cluster.submit()
    cluster.dispatcher.tick(AFTER_S)
    assert cancelled(cluster.dispatcher.cancel("r", 3.0)) == {("d1", FIRST), ("d2", SECOND)}
    cluster.assert_idle()


def test_no_hedge_without_other_workers_nor_while_requests_wait_nor_beyond_the_budget_nor_by_default() -> None:
    alone = hedged("d1")
    alone.submit()
    assert alone.dispatcher.tick(AFTER_S) == []

    busy = hedged("d1", "d2")
    for number in range(6):
        busy.submit(f"r{number}")
    busy.dispatcher.admission.policy = busy.dispatcher.admission.policy.model_copy(
        update={"queue": busy.dispatcher.admission.policy.queue.model_copy(update={"tokens_ahead": 1})}
    )
    busy.submit("waits")
    assert busy.dispatcher.admission.line
    assert busy.dispatcher.tick(AFTER_S) == []

    few = hedged("d1", "d2", max_share=0.01)
    for number in range(4):
        few.submit(f"r{number}")
    assert len(planned_on(few.dispatcher.tick(AFTER_S))) == 1

    off = Cluster("d1", "d2")
    off.submit()
    assert off.dispatcher.tick(100.0) == []


def test_a_long_prompt_is_not_late_before_a_multiple_of_what_was_predicted() -> None:
    cluster = hedged("d1", "d2", times_predicted=3.0)
    cluster.view.paces.usual = 0.1  # of 20 tokens: 2 s
    cluster.submit()
    assert cluster.dispatcher.tick(AFTER_S * 2) == []
    assert planned_on(cluster.dispatcher.tick(6.0)) == [("d2", None)]


def test_a_worker_that_loses_races_is_known_to_be_slow() -> None:
    cluster = hedged("d1", "d2")
    ref = cluster.refs["d1"]
    first = cluster.view.get(ref)
    assert first is not None
    cluster.view.learn_pace(ref, 0.0, 0.1, 100)
    cluster.view.learn_outrun(ref, 0.1, 2.1, 100)
    slower = first.pace.seconds
    assert slower is not None and slower > 0.003
    cluster.view.learn_outrun(ref, 2.1, 2.11, 100)  # it was not given long: nothing is known from that
    assert first.pace.seconds == slower


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ("{after_s: 0}", "after_s"),
        ("{after_s: 2, max_share: 1.5}", "max_share"),
        ("{after_s: 2, times_predicted: .inf}", "times_predicted"),
        ("{after_s: 2, often: true}", "often"),
    ],
)
def test_a_wrong_hedge_policy_is_refused_by_its_path(values: str, field: str) -> None:
    assert parse_policy("routing: {hedge: {}}").routing.hedge == HedgePolicy(after_s=2)
    assert parse_policy("routing: {}").routing.hedge is None
    with pytest.raises(BadRequest, match=f"routing.hedge.{field}"):
        parse_policy(f"routing: {{hedge: {values}}}")
