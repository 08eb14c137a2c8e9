"""A circuit breaker for each place: one that fails in a row gets no requests for a while, then one, then all again.

1. Closed: in use. A success, which is a request's first token or KV, ends a run of failures, here and below.
2. Open after MOST_FAILURES in a row: avoided until the back-off is over, which what fails meanwhile does not prolong.
3. Probed by the next request that is sent there: avoided again until it has said something, for a bounded time. If it
   fails the place is left alone for twice as long as before.

A place (`decode-0`) keeps its breaker over its worker's restarts, so that one which crashes again and again is left
alone for longer each time. A breaker narrows the choice and never empties it: where all workers of a role fail, all
are used (router/policy/candidates.py), as no answer is worse than one that may come.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MOST_FAILURES: Final = 3  # in a row
BACKOFF_S: Final = 1.0  # doubled each time that a probe fails
MOST_BACKOFF_S: Final = 30.0
PROBE_TIMEOUT_S: Final = 10.0  # a probe that says nothing for so long: another one may go
MOST_PLACES: Final = 4096


@dataclass(slots=True)
class _Breaker:
    """Of a place that has failed since it last succeeded. until_s: when a next request may go there."""

    num_failures: int = 0
    probed: bool = False
    backoff_s: float = BACKOFF_S
    until_s: float = 0.0

    @property
    def is_open(self) -> bool:
        return self.num_failures >= MOST_FAILURES


class Breakers:
    """Of all places; one without failures has none."""

    def __init__(self) -> None:
        self._breakers: dict[str, _Breaker] = {}

    @property
    def num_open(self) -> int:
        return sum(breaker.is_open for breaker in self._breakers.values())

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
        if breaker.probed:
            breaker.probed, breaker.backoff_s = False, min(2 * breaker.backoff_s, MOST_BACKOFF_S)
        elif breaker.num_failures != MOST_FAILURES:
            return
        breaker.until_s = now + breaker.backoff_s

    def chosen(self, place: str, now: float) -> None:
        """A request is sent there. While it is a probe, no other is."""
        breaker = self._breakers.get(place)
        if breaker is not None and breaker.is_open and now >= breaker.until_s:
            breaker.probed, breaker.until_s = True, now + PROBE_TIMEOUT_S
