"""How long a place waits before its next process, which must not end as soon as the last ones did. A quiet core."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Backoff:
    """Of one place: the n-th quick death in a row delays its next start by 0, first, 2 first, 4 first, ..., max."""

    first_s: float = 0.5
    max_s: float = 30.0
    stable_after_s: float = 10.0
    quick_deaths: int = 0
    """In a row, so far."""

    def died(self, up_s: float) -> float:
        """Seconds until the next start, of one that was ready for `up_s`."""
        if up_s >= self.stable_after_s:
            self.quick_deaths = 0
        # The exponent is bounded too: a float overflows after a thousand deaths.
        delay_s = min(self.first_s * 2.0 ** min(self.quick_deaths - 1, 32), self.max_s) if self.quick_deaths else 0.0
        self.quick_deaths += 1
        return delay_s
