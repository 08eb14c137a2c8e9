"""The fleet by tables: (event, now) in, effects out."""

from __future__ import annotations

from functools import partial
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.backoff import Backoff
from cluster.fleet import DrainRefused, Fleet, RefusalReason
from cluster.fleet_events import (
    Effect,
    EndWorker,
    Event,
    ForgetWorker,
    StartFailed,
    StartWorker,
    StopAsked,
    SwitchRole,
    Wake,
    WakeAt,
    WorkerDied,
    WorkerStarted,
)
from core.membership import Life, Role, WorkerRef

WANTED = {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE}
STABLE_AFTER_S = 60.0
BACKOFF = partial(Backoff, first_s=1.0, max_s=4.0, stable_after_s=STABLE_AFTER_S)


def make_fleet() -> Fleet:
    return Fleet(WANTED, Random(1), BACKOFF)


def started(effects: list[Effect]) -> list[WorkerRef]:
    return [effect.ref for effect in effects if isinstance(effect, StartWorker)]


def test_the_first_wake_starts_each_wanted_worker_once() -> None:
    fleet = make_fleet()
    effects = fleet.step(Wake(), 0.0)
    assert [(ref.worker_id, effect.role) for ref, effect in zip(started(effects), effects, strict=True)] == list(
        WANTED.items()
    )
    assert fleet.lives == {"prefill-0": Life.STARTING, "decode-0": Life.STARTING}
    assert fleet.step(Wake(), 1.0) == []


def test_a_dead_worker_is_forgotten_and_replaced_at_once_by_a_new_incarnation() -> None:
    fleet = make_fleet()
    _, decode = started(fleet.step(Wake(), 0.0))
    assert fleet.step(WorkerStarted(decode), 1.0) == []
    forget, start = fleet.step(WorkerDied(decode, "killed"), 2.0)
    assert forget == ForgetWorker(decode, "killed")
    assert isinstance(start, StartWorker)
    assert (start.ref.worker_id, start.role) == ("decode-0", Role.DECODE)
    assert start.ref.incarnation != decode.incarnation


def test_deaths_in_a_row_wait_twice_as_long_each_time_up_to_a_bound() -> None:
    fleet, now, delays = make_fleet(), 0.0, []
    decode = started(fleet.step(Wake(), now))[1]
    for _ in range(5):
        effects = fleet.step(StartFailed(decode, "no weights"), now)
        wakes = [effect.at_s for effect in effects if isinstance(effect, WakeAt)]
        delays.append(wakes[0] - now if wakes else 0.0)
        now = wakes[0] if wakes else now
        (decode,) = started(effects) or started(fleet.step(Wake(), now))
    assert delays == [0.0, 1.0, 2.0, 4.0, 4.0]


def test_a_wake_before_its_time_starts_nothing() -> None:
    fleet = make_fleet()
    decode = started(fleet.step(Wake(), 0.0))[1]
    (decode,) = started(fleet.step(StartFailed(decode, "x"), 0.0))
    assert fleet.step(StartFailed(decode, "x"), 0.0) == [ForgetWorker(decode, "x"), WakeAt(1.0)]
    assert fleet.step(Wake(), 0.9) == []
    assert len(started(fleet.step(Wake(), 1.0))) == 1


def test_a_worker_that_was_ready_for_long_is_replaced_at_once_again() -> None:
    fleet = make_fleet()
    decode = started(fleet.step(Wake(), 0.0))[1]
    (decode,) = started(fleet.step(StartFailed(decode, "x"), 0.0))
    fleet.step(WorkerStarted(decode), 1.0)
    (decode,) = started(fleet.step(WorkerDied(decode, "x"), 1.0 + STABLE_AFTER_S))
    fleet.step(WorkerStarted(decode), 100.0)
    assert not started(fleet.step(WorkerDied(decode, "x"), 101.0))  # the control: this life was short


def test_news_of_a_dead_life_changes_nothing() -> None:
    fleet = make_fleet()
    decode = started(fleet.step(Wake(), 0.0))[1]
    fleet.step(WorkerDied(decode, "killed"), 1.0)
    lives = fleet.lives
    for event in (WorkerStarted(decode), WorkerDied(decode, "again"), StartFailed(decode, "late")):
        assert fleet.step(event, 2.0) == []
    assert fleet.step(WorkerDied(WorkerRef("stranger", "1"), "?"), 2.0) == []
    assert fleet.lives == lives


def test_stop_drains_the_ready_kills_the_starting_and_replaces_nobody() -> None:
    fleet = make_fleet()
    prefill, decode = started(fleet.step(Wake(), 0.0))
    fleet.step(WorkerStarted(decode), 1.0)
    assert fleet.step(StopAsked(), 2.0) == [ForgetWorker(prefill, "stopped while starting"), EndWorker(decode)]
    assert fleet.step(StopAsked(), 2.0) == []
    assert fleet.step(WorkerDied(decode, "ended"), 3.0) == [ForgetWorker(decode, "ended")]
    assert fleet.step(Wake(), 1000.0) == []


def test_the_delay_stays_bounded_after_thousands_of_deaths() -> None:
    backoff = Backoff(quick_deaths=5000)
    assert backoff.died(0.0) == backoff.max_s


@given(st.lists(st.tuples(st.sampled_from(["start", "fail", "die", "wake"]), st.integers(0, 1)), max_size=60))
def test_never_more_lives_than_places_and_each_ends_once(script: list[tuple[str, int]]) -> None:
    fleet, now = make_fleet(), 0.0
    running: dict[WorkerRef, bool] = {}  # life -> has started
    born: list[WorkerRef] = []

    def feed(event: Event) -> None:
        for effect in fleet.step(event, now):
            match effect:
                case StartWorker(ref):
                    assert ref not in born
                    born.append(ref)
                    running[ref] = False
                case ForgetWorker(ref):
                    del running[ref]
        places = [ref.worker_id for ref in running]
        assert len(places) == len(set(places)) <= len(WANTED)

    feed(Wake())
    for action, index in script:
        now += 1.0
        ref = list(running)[index] if index < len(running) else None
        if action == "wake" or ref is None:
            feed(Wake())
        elif action == "start" and not running[ref]:
            running[ref] = True
            feed(WorkerStarted(ref))
        elif action == "fail" and not running[ref]:
            feed(StartFailed(ref, "no"))
        elif action == "die":
            feed(WorkerDied(ref, "dead"))
    now += 1000.0
    feed(Wake())
    assert len(running) == len(WANTED)


THREE = WANTED | {"decode-1": Role.DECODE}


def ready_fleet(wanted: dict[str, Role] = THREE) -> tuple[Fleet, dict[str, WorkerRef]]:
    fleet = Fleet(wanted, Random(1), BACKOFF)
    refs = {ref.worker_id: ref for ref in started(fleet.step(Wake(), 0.0))}
    for ref in refs.values():
        fleet.step(WorkerStarted(ref), 1.0)
    return fleet, refs


def refusal(fleet: Fleet, worker_id: str, to: Role | None, *, force: bool = False) -> RefusalReason:
    lives = fleet.lives
    with pytest.raises(DrainRefused) as caught:
        fleet.drain(worker_id, to, force=force)
    assert fleet.lives == lives
    return caught.value.reason


def test_a_worker_drains_and_serves_in_its_new_role_and_so_does_whoever_comes_next() -> None:
    fleet, refs = ready_fleet()
    assert fleet.drain("decode-1", Role.PREFILL, force=False) == refs["decode-1"]
    assert fleet.lives["decode-1"] is Life.DRAINING
    fleet.drained(refs["decode-1"], Role.PREFILL, done=True)
    assert fleet.lives["decode-1"] is Life.READY
    (start,) = [it for it in fleet.step(WorkerDied(refs["decode-1"], "x"), 2.0) if isinstance(it, StartWorker)]
    assert start.role is Role.PREFILL


def test_a_worker_that_could_not_change_keeps_its_role_and_one_that_dies_on_the_way_does_not() -> None:
    fleet, refs = ready_fleet()
    fleet.drain("decode-1", Role.PREFILL, force=False)
    fleet.drained(refs["decode-1"], Role.PREFILL, done=False)
    assert (fleet.lives["decode-1"], fleet.role_of("decode-1")) == (Life.READY, Role.DECODE)
    fleet.drain("decode-1", Role.PREFILL, force=False)
    (start,) = [it for it in fleet.step(WorkerDied(refs["decode-1"], "x"), 2.0) if isinstance(it, StartWorker)]
    assert start.role is Role.PREFILL
    fleet.drained(refs["decode-1"], Role.PREFILL, done=True)  # late news of a life that is over
    assert fleet.lives["decode-1"] is Life.STARTING
    assert fleet.drain("prefill-0", Role.DECODE, force=False)  # and nothing is under way any more


def test_one_worker_at_a_time_drains() -> None:
    fleet, refs = ready_fleet()
    fleet.drain("decode-1", Role.PREFILL, force=False)
    assert refusal(fleet, "decode-1", Role.PREFILL) is RefusalReason.BUSY
    assert refusal(fleet, "prefill-0", Role.DECODE, force=True) is RefusalReason.BUSY
    fleet.drained(refs["decode-1"], Role.PREFILL, done=True)
    fleet.drain("prefill-0", Role.DECODE, force=False)


def test_the_last_decode_worker_goes_on_unless_forced_and_the_last_prefill_worker_may_change() -> None:
    fleet, refs = ready_fleet(WANTED)
    assert refusal(fleet, "decode-0", Role.PREFILL) is RefusalReason.LAST_DECODE_WORKER
    assert refusal(fleet, "decode-0", None) is RefusalReason.LAST_DECODE_WORKER
    fleet.drain("prefill-0", Role.DECODE, force=False)
    fleet.drained(refs["prefill-0"], Role.DECODE, done=True)
    fleet.drain("decode-0", Role.PREFILL, force=False)  # for now another one decodes
    fleet.drained(refs["decode-0"], Role.PREFILL, done=True)
    assert refusal(fleet, "prefill-0", None) is RefusalReason.LAST_DECODE_WORKER
    fleet.drain("prefill-0", Role.PREFILL, force=True)


def test_who_is_not_there_or_not_ready_is_named() -> None:
    fleet = Fleet(THREE, Random(1), BACKOFF)
    assert refusal(fleet, "decode-7", Role.PREFILL) is RefusalReason.UNKNOWN_WORKER
    assert refusal(fleet, "decode-1", Role.PREFILL) is RefusalReason.NOT_READY
    fleet.step(Wake(), 0.0)
    assert refusal(fleet, "decode-1", Role.PREFILL) is RefusalReason.NOT_READY
    fleet, _ = ready_fleet()
    fleet.step(StopAsked(), 2.0)
    assert refusal(fleet, "decode-1", Role.PREFILL) is RefusalReason.NOT_READY


def test_a_drained_worker_takes_nothing_until_it_is_put_back_or_replaced() -> None:
    fleet, refs = ready_fleet()
    fleet.drain("decode-1", None, force=False)
    fleet.drained(refs["decode-1"], None, done=True)
    assert fleet.lives["decode-1"] is Life.DRAINING
    assert refusal(fleet, "decode-0", None) is RefusalReason.LAST_DECODE_WORKER
    fleet.drain("decode-1", Role.DECODE, force=False)
    fleet.drained(refs["decode-1"], Role.DECODE, done=True)
    assert fleet.lives["decode-1"] is Life.READY


def test_a_stop_takes_over_from_a_drain() -> None:
    fleet, refs = ready_fleet()
    fleet.drain("decode-1", Role.PREFILL, force=False)
    assert EndWorker(refs["decode-1"]) in fleet.step(StopAsked(), 2.0)
    fleet.drained(refs["decode-1"], Role.PREFILL, done=False)
    assert fleet.lives["decode-1"] is Life.DRAINING


def test_a_worker_that_is_taken_over_is_watched_like_one_of_ours_and_not_started_twice() -> None:
    fleet, old = make_fleet(), WorkerRef("decode-0", "of-before")
    assert fleet.adopt(old, Role.PREFILL, 0.0)  # it had changed its role
    assert fleet.role_of("decode-0") is Role.PREFILL and fleet.lives["decode-0"] is Life.READY
    assert not fleet.adopt(WorkerRef("decode-0", "another"), Role.DECODE, 0.0)
    assert not fleet.adopt(WorkerRef("decode-7", "a"), Role.DECODE, 0.0)
    assert [ref.worker_id for ref in started(fleet.step(Wake(), 0.0))] == ["prefill-0"]
    effects = fleet.step(WorkerDied(old, "killed"), 100.0)
    assert ForgetWorker(old, "killed") in effects
    assert [ref.worker_id for ref in started(effects)] == ["decode-0"]


class StandIn:
    """A prefill and a decode worker that are ready, with stand-ins."""

    def __init__(self, *, stand_in: bool = True, wanted: dict[str, Role] = WANTED) -> None:
        self.fleet = Fleet(wanted, Random(1), BACKOFF, stand_in=stand_in)
        self.refs = {ref.worker_id: ref for ref in started(self.fleet.step(Wake(), 0.0))}
        for ref in self.refs.values():  # prefill-0 first: nobody stands in for one that has never been there
            assert self.switches(WorkerStarted(ref), 1.0) == []

    def switches(self, event: Event, now: float = 2.0) -> list[tuple[str, Role]]:
        effects = self.fleet.step(event, now)
        self.refs |= {ref.worker_id: ref for ref in started(effects)}
        return [(effect.ref.worker_id, effect.to) for effect in effects if isinstance(effect, SwitchRole)]

    def die(self, worker_id: str) -> list[tuple[str, Role]]:
        return self.switches(WorkerDied(self.refs[worker_id], "killed"))

    def drained(self, to: Role, *, done: bool = True) -> list[tuple[str, Role]]:
        self.fleet.drained(self.refs["prefill-0"], to, done=done)
        return self.switches(Wake())


def test_a_prefill_worker_stands_in_for_the_last_decode_worker_and_goes_back() -> None:
    cluster = StandIn()
    assert cluster.die("decode-0") == [("prefill-0", Role.DECODE)]
    assert cluster.switches(Wake()) == []  # it is under way
    assert cluster.drained(Role.DECODE) == []
    assert cluster.fleet.role_of("prefill-0") is Role.DECODE
    assert cluster.switches(WorkerStarted(cluster.refs["decode-0"])) == [("prefill-0", Role.PREFILL)]
    assert cluster.drained(Role.PREFILL, done=False) == [("prefill-0", Role.PREFILL)]  # not idle in time: again
    assert cluster.drained(Role.PREFILL) == []
    assert cluster.fleet.role_of("prefill-0") is Role.PREFILL
    assert cluster.die("decode-0") == [("prefill-0", Role.DECODE)]
    assert cluster.drained(Role.DECODE, done=False) == [("prefill-0", Role.DECODE)]


def test_one_that_stands_in_and_dies_starts_again_as_what_it_was() -> None:
    cluster = StandIn()
    cluster.die("decode-0")
    cluster.drained(Role.DECODE)
    effects = cluster.fleet.step(WorkerDied(cluster.refs["prefill-0"], "killed"), 2.0)
    roles = [(it.ref.worker_id, it.role) for it in effects if isinstance(it, StartWorker)]
    assert roles == [("prefill-0", Role.PREFILL)]


def test_nobody_stands_in_where_another_decodes_or_an_operator_wants_it_so_or_all_ends() -> None:
    assert StandIn(stand_in=False).die("decode-0") == []
    assert StandIn(wanted=THREE).die("decode-0") == []
    drained = StandIn()
    ref = drained.fleet.drain("decode-0", None, force=True)
    drained.fleet.drained(ref, None, done=True)
    assert drained.switches(Wake()) == []
    stopping = StandIn()
    stopping.switches(StopAsked())
    assert stopping.die("decode-0") == []
    asked = StandIn()
    asked.die("decode-0")
    asked.drained(Role.DECODE)
    assert not asked.fleet.serves_as("prefill-0", Role.DECODE)
    asked.fleet.drain("prefill-0", Role.DECODE, force=True)  # for good
    asked.drained(Role.DECODE)
    assert asked.fleet.serves_as("prefill-0", Role.DECODE)
    assert asked.switches(WorkerStarted(asked.refs["decode-0"])) == []


def standing() -> StandIn:
    cluster = StandIn()
    cluster.die("decode-0")
    cluster.drained(Role.DECODE)
    return cluster


def test_a_place_whose_stand_in_is_drained_by_hand_is_what_it_was() -> None:
    cluster = standing()
    ref = cluster.fleet.drain("prefill-0", None, force=True)
    cluster.fleet.drained(ref, None, done=True)
    effects = cluster.fleet.step(WorkerDied(ref, "drained"), 2.0)
    assert [it.role for it in effects if isinstance(it, StartWorker) and it.ref.worker_id == "prefill-0"] == [
        Role.PREFILL
    ]


@pytest.mark.parametrize("stand_in", [True, False])
@pytest.mark.parametrize("decode_lives", [True, False])
def test_a_stand_in_that_the_next_controller_takes_over_goes_back(stand_in: bool, decode_lives: bool) -> None:
    for stands_in, to in ((True, [Role.PREFILL]), (False, [])):  # the control: an operator wanted it to decode
        fleet, ref = Fleet(WANTED, Random(2), BACKOFF, stand_in=stand_in), WorkerRef("prefill-0", "of-before")
        assert fleet.adopt(ref, Role.DECODE, 0.0, stands_in=stands_in)
        if decode_lives:
            assert fleet.adopt(WorkerRef("decode-0", "of-before"), Role.DECODE, 0.0)
        effects = fleet.step(Wake(), 0.0)
        for decode in started(effects):
            assert not any(isinstance(effect, SwitchRole) for effect in effects)
            effects = fleet.step(WorkerStarted(decode), 1.0)
        assert [(it.ref, it.to) for it in effects if isinstance(it, SwitchRole)] == [(ref, role) for role in to]


def test_a_stand_in_that_the_next_controller_takes_over_and_that_dies_prefills() -> None:
    fleet, ref = Fleet(WANTED, Random(2), BACKOFF, stand_in=True), WorkerRef("prefill-0", "of-before")
    fleet.adopt(ref, Role.DECODE, 0.0, stands_in=True)
    effects = fleet.step(WorkerDied(ref, "killed"), 100.0)
    assert [it.role for it in effects if isinstance(it, StartWorker)] == [Role.PREFILL]


def test_a_prefill_worker_that_is_taken_over_stands_in_for_a_decode_worker_that_is_not_there() -> None:
    fleet, ref = Fleet(WANTED, Random(2), BACKOFF, stand_in=True), WorkerRef("prefill-0", "of-before")
    fleet.adopt(ref, Role.PREFILL, 0.0)
    assert SwitchRole(ref, Role.DECODE) in fleet.step(Wake(), 0.0)


def test_streams_do_not_follow_a_worker_that_dies_at_once_each_time() -> None:
    cluster, now, returned = standing(), 1.0, 0
    for _ in range(6):
        effects = cluster.fleet.step(WorkerStarted(cluster.refs["decode-0"]), now)
        if any(isinstance(it, SwitchRole) for it in effects):
            returned += 1
            cluster.drained(Role.PREFILL)
        effects = cluster.fleet.step(WorkerDied(cluster.refs["decode-0"], "again"), now + 0.5)
        if any(isinstance(it, SwitchRole) for it in effects):
            cluster.drained(Role.DECODE)
        while not (starts := [it for it in effects if isinstance(it, StartWorker)]):
            now = max(it.at_s for it in effects if isinstance(it, WakeAt))
            effects = cluster.fleet.step(Wake(), now)
        cluster.refs["decode-0"] = starts[0].ref
        now += 1.0
    assert returned <= 1
