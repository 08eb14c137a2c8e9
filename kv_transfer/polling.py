"""How often the transfer thread asks NIXL, which has no event to wait for, what came. Without clock or thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MANY_MISSED: Final = 3  # in a row: on busy cores a ring may come much later than its notice


@dataclass(frozen=True, slots=True)
class PollingPeriods:
    """How long the thread sleeps after a pass that brought nothing. A command wakes it at once, and so does a peer that
    rings (kv_transfer/doorbell.py) because it has posted something, and again while that is under way."""

    active_s: float = 100e-6  # operations in flight, or something happened within `linger_s`
    linger_s: float = 10e-3  # a target cannot see that bytes are coming: stay quick between a sender's pushes and rings
    idle_s: float = 50e-3  # costs 0.5 % of a core; how late a notice is at most when its ring was lost
    unrung_s: float = 1e-3  # costs 5 % of a core: peers' rings do not arrive here


class PollingRhythm:
    """Told of each pass, says how long to sleep before the next."""

    def __init__(self, periods: PollingPeriods) -> None:
        self._periods = periods
        self._active_until_s = 0.0
        self._idle = False
        self._unannounced = False  # a notice was found by chance, and its ring has not come yet
        self._num_missed = 0  # of these in a row, those whose rings did not come before the next rest either

    @property
    def unrung(self) -> bool:
        """Notices come, and no ring with them."""
        return self._num_missed >= MANY_MISSED

    def passed(self, now_s: float, *, ran: bool, moved: bool, rung: bool, in_flight: bool) -> float:
        """Seconds to sleep after a pass.

        ran: a command. moved: a notice came or an operation settled. rung: a peer ended the sleep before the pass.
        """
        if rung:
            self._unannounced, self._num_missed = False, 0
        elif self._idle:
            self._num_missed += self._unannounced
            self._unannounced = moved and not ran
        if ran or moved or rung:
            self._active_until_s = now_s + self._periods.linger_s
        self._idle = not (ran or moved or in_flight or now_s < self._active_until_s)
        if self._idle:
            return self._periods.unrung_s if self.unrung else self._periods.idle_s
        return 0.0 if ran or moved else self._periods.active_s
