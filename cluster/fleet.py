"""Which workers there should be, and what to do when one is not: a quiet core, told events and times.

One place for each wanted worker; a place holds at most one life at a time (core.membership.LIFE_NEXT), so there are
never more workers than wanted. A dead worker is replaced at once; one that dies again before it was READY for
`stable_after_s` waits, twice as long each time, up to a bound.

A place has a wanted role, which `drain` changes: whoever lives there next has it too, also when its worker dies on the
way. Only a worker that says that it could not change gives the old one back. One place at a time drains.

While no decode worker is ready and a dead one is being replaced, nothing can be served. Then a ready prefill worker
stands in: it decodes, and prefills as well, until a decode worker is ready again. Whoever lives in its place next
prefills.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Final, assert_never

from cluster.backoff import Backoff
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
from core.errors import TandemError
from core.membership import Life, Role, WorkerRef, next_life

INCARNATION_BITS: Final = 64


class RefusalReason(StrEnum):
    """Why a worker is not drained, or does not change its role: one closed list for callers (proto: DrainOutcome)."""

    UNKNOWN_WORKER = "unknown_worker"
    NOT_READY = "not_ready"  # starting, gone, or on its way out
    BUSY = "busy"  # another drain is under way
    LAST_DECODE_WORKER = "last_decode_worker"  # nobody else is ready to decode; can be forced
    NOT_DRAINED = "not_drained"  # it goes on as it was
    WORKER_LOST = "worker_lost"  # on the way; its place starts again, in the role that was wanted


class DrainRefused(TandemError):
    """The worker goes on as it was, unless `reason` says otherwise."""

    def __init__(self, reason: RefusalReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(slots=True)
class _Place:
    worker_id: str
    role: Role  # that it has, or will have
    backoff: Backoff
    ref: WorkerRef | None = None  # None exactly when life is GONE
    life: Life = Life.GONE
    due_s: float = float("-inf")  # not started again before
    ready_since_s: float = 0.0
    role_before: Role | None = None  # while a drain is under way: the role to fall back to
    has_served: bool = False  # some life of it was READY, as far as we know
    stands_in: bool = False  # its worker decodes, or is about to, and its role is PREFILL all the same


class Fleet:
    """wanted: the role of each place. stand_in: prefill workers stand in for decode workers."""

    def __init__(
        self,
        wanted: Mapping[str, Role],
        random: Random,
        backoff: Callable[[], Backoff] = Backoff,
        *,
        stand_in: bool = False,
    ) -> None:
        self._places = {worker_id: _Place(worker_id, role, backoff()) for worker_id, role in wanted.items()}
        self._random = random
        self._stand_in = stand_in
        self._stopping = False

    @property
    def lives(self) -> dict[str, Life]:
        """Life of each place's present worker."""
        return {place.worker_id: place.life for place in self._places.values()}

    def role_of(self, worker_id: str) -> Role | None:
        """The wanted role of a place; None: there is no such place."""
        place = self._places.get(worker_id)
        return None if place is None else place.role

    def serves_as(self, worker_id: str, role: Role) -> bool:
        """It is READY and stays in this role: it does not stand in."""
        place = self._places.get(worker_id)
        return place is not None and place.life is Life.READY and place.role is role and not place.stands_in

    def adopt(self, ref: WorkerRef, role: Role, now: float, *, stands_in: bool = False) -> bool:
        """A READY worker that an earlier controller started is the life of its place. False: that is taken, or there is
        no such place."""
        place = self._places.get(ref.worker_id)
        if place is None or place.ref is not None:
            return False
        place.ref, place.role, place.life, place.ready_since_s = ref, role, Life.READY, now
        place.stands_in = stands_in
        for it in self._places.values():  # also where nobody lives now: the cluster serves already
            it.has_served = True
        return True

    def drain(self, worker_id: str, to: Role | None, *, force: bool) -> WorkerRef:
        """The worker that is to drain, and then to serve as `to`; None: nothing. Say how it ended by `drained`.

        force: also when nobody else is ready to decode. Raises: DrainRefused: nothing changes.
        """
        place = self._places.get(worker_id)
        if place is None:
            raise DrainRefused(RefusalReason.UNKNOWN_WORKER, f"{worker_id} is none of {', '.join(self._places)}")
        busy = next((it.worker_id for it in self._places.values() if it.role_before is not None), None)
        if busy is not None:
            raise DrainRefused(RefusalReason.BUSY, f"{busy} is draining: one worker at a time")
        if place.ref is None or place.life is Life.STARTING or self._stopping:
            raise DrainRefused(RefusalReason.NOT_READY, f"{worker_id} is {place.life}, not ready")
        others = (it for it in self._places.values() if it is not place and it.life is Life.READY)
        leaves = place.role is Role.DECODE and place.life is Life.READY and to is not Role.DECODE
        if leaves and not force and not any(it.role is Role.DECODE for it in others):
            message = f"{worker_id} is the last decode worker that is ready: without it nothing is served"
            raise DrainRefused(RefusalReason.LAST_DECODE_WORKER, message)
        place.stands_in = place.stands_in and to is not Role.DECODE
        self._begin_drain(place, to or place.role)
        return place.ref

    def _begin_drain(self, place: _Place, to: Role) -> None:
        if place.life is Life.READY:
            place.life = next_life(place.worker_id, place.life, Life.DRAINING)
        place.role_before, place.role = place.role, to

    def drained(self, ref: WorkerRef, to: Role | None, *, done: bool) -> None:
        """The worker serves as `to`, or as before when it could not; without `to` it takes no work in any case."""
        place = self._place_of(ref)
        if place is None or place.role_before is None or self._stopping:
            return
        place.role, place.role_before = place.role if done else place.role_before, None
        place.stands_in = place.stands_in and place.role is Role.DECODE
        if to is not None:
            place.life = next_life(ref.worker_id, place.life, Life.READY)

    def step(self, event: Event, now: float) -> list[Effect]:
        """What to do after `event`, which happened at `now` (monotonic seconds)."""
        return [*self._react(event, now), *self._stand_ins(now)]

    def _react(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Wake():
                return self._start_due(now)
            case WorkerStarted(ref):
                return self._started(ref, now)
            case StartFailed(ref, reason) | WorkerDied(ref, reason):
                return self._ended(ref, reason, now)
            case StopAsked():
                return self._stop()
            case _:
                assert_never(event)

    def _stand_ins(self, now: float) -> list[Effect]:
        """Who is to stand in from now on, or no longer."""
        places = self._places.values()
        if self._stopping or any(it.role_before is not None for it in places):
            return []
        ready = [it for it in places if it.life is Life.READY]
        decodes = [it for it in ready if it.role is Role.DECODE]
        standing = [it for it in decodes if it.stands_in]
        back = [it for it in decodes if not it.stands_in]
        if standing and back:  # to one that has died twice in a row only when it has lasted: streams would follow it
            steady_s = min(it.ready_since_s + (it.backoff.quick_deaths > 1) * it.backoff.stable_after_s for it in back)
            return self._switch(standing[0], Role.PREFILL) if now >= steady_s else [WakeAt(steady_s)]
        if not self._stand_in:  # but one that does already goes back
            return []
        away = (Life.STARTING, Life.GONE)
        being_replaced = any(it.role is Role.DECODE and it.has_served and it.life in away for it in places)
        prefills = [it for it in ready if it.role is Role.PREFILL]
        return self._switch(prefills[0], Role.DECODE) if prefills and not decodes and being_replaced else []

    def _switch(self, place: _Place, to: Role) -> list[Effect]:
        assert place.ref is not None
        place.stands_in = True
        self._begin_drain(place, to)
        return [SwitchRole(place.ref, to)]

    def _start_due(self, now: float) -> list[Effect]:
        due = [place for place in self._places.values() if place.ref is None and place.due_s <= now]
        return [] if self._stopping else [self._start(place) for place in due]

    def _start(self, place: _Place) -> StartWorker:
        place.ref = WorkerRef(place.worker_id, f"{self._random.getrandbits(INCARNATION_BITS):016x}")
        place.life = Life.STARTING
        return StartWorker(place.ref, place.role)

    def _started(self, ref: WorkerRef, now: float) -> list[Effect]:
        place = self._place_of(ref)
        if place is None:
            return []
        place.life = next_life(ref.worker_id, place.life, Life.READY)
        place.ready_since_s, place.has_served = now, True
        return []

    def _ended(self, ref: WorkerRef, reason: str, now: float) -> list[Effect]:
        place = self._place_of(ref)
        if place is None:
            return []
        up_s = 0.0 if place.life is Life.STARTING else now - place.ready_since_s
        place.life = next_life(ref.worker_id, place.life, Life.GONE)
        place.ref = place.role_before = None
        if place.stands_in:
            place.role, place.stands_in = Role.PREFILL, False
        place.due_s = now + place.backoff.died(up_s)
        effects: list[Effect] = [ForgetWorker(ref, reason)]
        if not self._stopping:
            effects.append(self._start(place) if place.due_s <= now else WakeAt(place.due_s))
        return effects

    def _stop(self) -> list[Effect]:
        if self._stopping:
            return []
        self._stopping = True
        effects: list[Effect] = []
        for place in self._places.values():
            if place.ref is None:
                continue
            if place.life is not Life.STARTING:
                place.life = Life.DRAINING  # as it is when it drains for another role
                effects.append(EndWorker(place.ref))
            else:
                effects.append(ForgetWorker(place.ref, "stopped while starting"))
                place.life, place.ref = next_life(place.worker_id, place.life, Life.GONE), None
        return effects

    def _place_of(self, ref: WorkerRef) -> _Place | None:
        """The place whose present life `ref` is; None for news of a life that is over."""
        place = self._places.get(ref.worker_id)
        return place if place is not None and place.ref == ref else None
