"""A circuit breaker for each place: one that fails in a row gets no requests for a while, then one, then all again.

A place (`decode-0`) keeps its breaker over its worker's restarts, so that one which crashes again and again is left
alone for longer each time. A breaker narrows the choice and never empties it: where all workers of a role fail, all
are used (router/policy/candidates.py), as no answer is worse than one that may come.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

MOST_FAILURES: Final = 3  # in a row
BACKOFF_S: Final = 1.0  # doubled each time that a probe fails
MOST_BACKOFF_S: Final = 30.0
PROBE_TIMEOUT_S: Final = 10.0  # a probe that says nothing for so long: another one may go
MOST_PLACES: Final = 4096


class State(StrEnum):
    """CLOSED: in use. OPEN: avoided until its back-off is over. HALF_OPEN: one request is there to probe it."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Event(StrEnum):
    SUCCEEDED = "succeeded"  # a request's first token, or its KV, came
    FAILED = "failed"  # the last of a run of failures, where it was closed
    PROBED = "probed"  # a request was sent there after the back-off


NEXT: Final[dict[tuple[State, Event], State]] = {
    (State.CLOSED, Event.SUCCEEDED): State.CLOSED,
    (State.CLOSED, Event.FAILED): State.OPEN,
    (State.OPEN, Event.PROBED): State.HALF_OPEN,
    (State.OPEN, Event.FAILED): State.OPEN,  # what was under way there
    (State.OPEN, Event.SUCCEEDED): State.CLOSED,
    (State.HALF_OPEN, Event.PROBED): State.HALF_OPEN,  # another one, after the first said nothing
    (State.HALF_OPEN, Event.FAILED): State.OPEN,
    (State.HALF_OPEN, Event.SUCCEEDED): State.CLOSED,
}


@dataclass(slots=True)
class _Breaker:
    """until_s: when a next request may go there."""

    state: State = State.CLOSED
    num_failures: int = 0
    backoff_s: float = BACKOFF_S
    until_s: float = 0.0


class Breakers:
    """Of all places that have failed since they last succeeded."""

    def __init__(self) -> None:
        self._breakers: dict[str, _Breaker] = {}

    @property
    def num_open(self) -> int:
        return sum(breaker.state is not State.CLOSED for breaker in self._breakers.values())

    def state(self, place: str) -> State:
        breaker = self._breakers.get(place)
        return State.CLOSED if breaker is None else breaker.state

    def avoided(self, now: float) -> frozenset[str]:
        """Places that get no request now."""
        return frozenset(place for place, breaker in self._breakers.items() if now < breaker.until_s)

    def succeeded(self, place: str) -> None:
        self._breakers.pop(place, None)

    def failed(self, place: str, now: float) -> None:
        breaker = self._breakers.pop(place, None) or _Breaker()
        self._breakers[place] = breaker  # the latest failures last: of too many places the others are forgotten
        while len(self._breakers) > MOST_PLACES:
            del self._breakers[next(iter(self._breakers))]
        breaker.num_failures += 1
        if breaker.num_failures < MOST_FAILURES:
            return
        if breaker.state is State.HALF_OPEN:
            breaker.backoff_s = min(2 * breaker.backoff_s, MOST_BACKOFF_S)
        if breaker.state is not State.OPEN:
            breaker.until_s = now + breaker.backoff_s
        breaker.state = NEXT[breaker.state, Event.FAILED]

    def chosen(self, place: str, now: float) -> None:
        """A request is sent there. While it is a probe, no other is."""
        breaker = self._breakers.get(place)
        if breaker is not None and breaker.state is not State.CLOSED and now >= breaker.until_s:
            breaker.state = NEXT[breaker.state, Event.PROBED]
            breaker.until_s = now + PROBE_TIMEOUT_S
