"""What a draining worker's requests do: at once, later, or not at all where nobody else could have them."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from core.membership import NOTHING_GIVEN, GivenWork, Life, Role, WorkerLoad, WorkerRef
from core.messages import (
    CancelRequest,
    Draining,
    Refused,
    RefuseReason,
    ReserveBlocks,
    Serving,
    StartGeneration,
    StartPrefill,
)
from core.request import Placement
from router.effects import Effect, Planned, Send
from router.registry_service import worker_status
from tests.router.test_dispatcher import IDLE, Cluster, by_choice, commands, delta, failure


def drain(cluster: Cluster, name: str, *unbegun: str, finish_s: float = 5.0, now: float = 1.0) -> list[Effect]:
    return cluster.dispatcher.answered(cluster.refs[name], Draining(finish_s, unbegun), now)


def plans(effects: Iterable[Effect]) -> list[tuple[WorkerRef, WorkerRef | None]]:
    return [(effect.plan.decode, effect.plan.prefill) for effect in effects if isinstance(effect, Planned)]


def sent(effects: Iterable[Effect], ref: WorkerRef) -> list[object]:
    return [effect.command for effect in effects if isinstance(effect, Send) and effect.worker == ref]


def test_a_stream_goes_on_until_its_time_is_over_and_then_elsewhere_from_its_latest_token() -> None:
    cluster = Cluster("d1", "d2", max_silent_failures=1, max_failures=0)  # a drain is nobody's failure
    assert plans(cluster.submit()) == [(cluster.refs["d1"], None)]
    cluster.say("d1", delta(0, 7))
    assert drain(cluster, "d1", finish_s=5.0) == []
    assert by_choice(cluster.say("d1", delta(1, 8), now=5.0)) == {0: [8]}
    assert cluster.dispatcher.tick(5.9) == []
    moved = cluster.dispatcher.tick(6.0)
    assert sent(moved, cluster.refs["d1"]) == [CancelRequest("r#x.1")]
    (start,) = sent(moved, cluster.refs["d2"])
    assert isinstance(start, StartGeneration) and start.request.output_token_ids == (7, 8)
    assert cluster.say("d1", delta(2, 9)) == []  # late, from the old place
    assert by_choice(cluster.say("d2", delta(2, 9, attempt="r#x.2"))) == {0: [9]}
    assert cluster.dispatcher.tick(100.0) == []


def test_what_has_not_begun_leaves_at_once_and_what_has_stays() -> None:
    cluster = Cluster("d1", "d2", max_silent_failures=1)
    both = [cluster.submit(name, now=0.0) for name in ("a", "b", "c", "d")]
    on_d1 = [f"{name}#x.{index + 1}" for index, name in enumerate("abcd") if plans(both[index])[0][0].worker_id == "d1"]
    assert len(on_d1) == 2
    moved = drain(cluster, "d1", on_d1[1])
    assert sent(moved, cluster.refs["d1"]) == [CancelRequest(on_d1[1])]
    assert plans(moved) == [(cluster.refs["d2"], None)]


def test_a_prompt_leaves_a_draining_prefill_worker_before_its_ticket_and_a_hand_off_may_still_land() -> None:
    cluster = Cluster("p1", "p2", "d1")
    (plan,) = plans(cluster.submit())
    assert plan == (cluster.refs["d1"], cluster.refs["p1"])
    moved = drain(cluster, "p1")
    assert CancelRequest("r#x.1") in sent(moved, cluster.refs["d1"])
    assert plans(moved) == [(cluster.refs["d1"], cluster.refs["p2"])]
    cluster.reserved("r#x.2")
    assert drain(cluster, "p2", finish_s=3.0, now=2.0) == []  # it may finish: d1 could do it all, and must not yet
    late = cluster.dispatcher.tick(5.0)
    assert sent(late, cluster.refs["p2"]) == [CancelRequest("r#x.2")]
    assert plans(late) == [(cluster.refs["d1"], None)]


def test_a_hand_off_that_has_not_landed_on_a_draining_decode_worker_is_planned_again() -> None:
    cluster = Cluster("p1", "d1", "d2")
    cluster.submit(placement=Placement.REMOTE)
    cluster.reserved()
    assert drain(cluster, "d1", finish_s=3.0) == []
    moved = cluster.dispatcher.tick(4.0)
    assert sent(moved, cluster.refs["d1"]) == [CancelRequest("r#x.1")]
    assert sent(moved, cluster.refs["p1"]) == [CancelRequest("r#x.1")]
    (reserve,) = sent(moved, cluster.refs["d2"])
    assert isinstance(reserve, ReserveBlocks) and reserve.source == cluster.refs["p1"]


def test_where_nobody_else_is_everything_stays_and_new_requests_wait() -> None:
    cluster = Cluster("d1")
    cluster.submit()
    cluster.say("d1", delta(0, 7))
    cluster.submit("unbegun")
    assert drain(cluster, "d1", "unbegun#x.2", finish_s=0.0) == []
    assert commands(cluster.submit("new")) == []
    assert cluster.dispatcher.tick(2.0) == []
    assert by_choice(cluster.say("d1", delta(1, 8), now=3.0)) == {0: [8]}
    came = cluster.join("d2")
    assert [type(command) for command in commands(came)] == [StartGeneration]
    assert len(plans(cluster.dispatcher.tick(4.0))) == 2


def test_each_choice_of_several_leaves() -> None:
    cluster = Cluster("d1", "d2")
    cluster.submit(num_choices=3)
    cluster.say("d1", delta(0, 7), delta(0, 8, choice=1), delta(0, 9, choice=2))
    moved = drain(cluster, "d1", finish_s=0.0)
    starts = [command for command in sent(moved, cluster.refs["d2"]) if isinstance(command, StartGeneration)]
    assert [start.request.output_token_ids for start in starts] == [(7,), (8,), (9,)]


def test_a_worker_that_serves_in_another_role_is_planned_for_that_and_for_nothing_else() -> None:
    cluster = Cluster("d1", "d2")
    drain(cluster, "d2")
    cluster.dispatcher.answered(cluster.refs["d2"], Serving(Role.PREFILL), 2.0)
    worker = cluster.view.get(cluster.refs["d2"])
    assert worker is not None and (worker.life, worker.info.role) == (Life.READY, Role.PREFILL)
    assert plans(cluster.submit()) == [(cluster.refs["d1"], cluster.refs["d2"])]
    assert any(isinstance(command, StartPrefill) for command in commands(cluster.reserved()))


def test_a_worker_that_serves_again_gets_what_waited_and_keeps_it() -> None:
    cluster = Cluster("d1")
    drain(cluster, "d1", finish_s=0.0)
    cluster.submit()
    served = cluster.dispatcher.answered(cluster.refs["d1"], Serving(Role.DECODE), 2.0)
    assert plans(served) == [(cluster.refs["d1"], None)]
    cluster.join("d2")
    assert cluster.dispatcher.tick(10.0) == []


def test_what_was_sent_before_a_switch_was_known_is_planned_again_a_bounded_number_of_times() -> None:
    cluster = Cluster("d1", max_silent_failures=2)
    cluster.submit()
    again = cluster.dispatcher.answered(cluster.refs["d1"], Refused("r#x.1", RefuseReason.WRONG_ROLE), 0.0)
    assert plans(again)
    ended = cluster.dispatcher.answered(cluster.refs["d1"], Refused("r#x.2", RefuseReason.WRONG_ROLE), 0.0)
    assert "role" in str(failure(ended))
    cluster.assert_idle()


@pytest.mark.parametrize("life", [Life.STARTING, None])
def test_a_drain_of_who_is_not_ready_or_not_known_changes_nothing(life: Life | None) -> None:
    cluster = Cluster("d1")
    if life is None:
        cluster.dispatcher.worker_lost(cluster.refs["d1"], 0.0)
    else:
        worker = cluster.view.get(cluster.refs["d1"])
        assert worker is not None
        worker.life = life
    assert drain(cluster, "d1", finish_s=0.0) == []
    assert cluster.dispatcher.answered(cluster.refs["d1"], Serving(Role.DECODE), 2.0) == []


def test_people_are_told_when_nothing_of_a_draining_worker_is_left() -> None:
    cluster = Cluster("d1")
    worker = cluster.view.get(cluster.refs["d1"])
    assert worker is not None

    def said(load: WorkerLoad = IDLE, others: GivenWork = NOTHING_GIVEN) -> str:
        cluster.view.heard(worker.ref, load, others, now=2.0)
        return str(worker_status(worker).life)

    cluster.submit()
    assert said() == "ready"
    drain(cluster, "d1")
    assert said() == "draining"  # what was sent is newer than what it reports
    cluster.dispatcher.cancel("r", now=2.0)
    assert said() == "drained"
    for name in ("running_requests", "waiting_requests", "used_blocks", "quarantined_blocks"):
        assert said(WorkerLoad(**{name: 1})) == "draining"
    assert said(others=GivenWork(1, 8)) == "draining"
    assert said() == "drained"
    cluster.dispatcher.answered(worker.ref, Serving(Role.DECODE), now=3.0)
    assert said() == "ready"
