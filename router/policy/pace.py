"""How long workers take for a prompt token: one of them, those of a role, all. Told the time; no clock.

What a worker has shown holds for a while. The longer ago that was, the more it is taken to be like the workers of its
role, and these like all: one that looked slow once, as it was cold or had lost a race, is tried again. Then its newest
prompt counts for most of what is known of it, so that one that is slow still is avoided again at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from core.membership import Role

WEIGHT: Final = 0.2  # of the newest sample, where what is known is as new
# By then a worker that looked 16 times as slow as its peers looks 2.8 times as slow; after twice as long, 1.5 times.
MEMORY_S: Final = 60.0


@dataclass(slots=True)
class Pace:
    """Seconds for a prompt token, learnt from samples; None before the first one.

    0 where all samples came in one step with another prompt's: as if there were none.
    """

    seconds: float | None = None
    _at_s: float = 0.0

    def at(self, now: float, usual: float | None) -> float | None:
        """What is to be expected now. usual: of its peers; None: not known."""
        if not self.seconds or not usual:
            return self.seconds or usual
        return usual * math.pow(self.seconds / usual, self._freshness(now))

    def learn(self, sample: float, usual: float | None, now: float) -> None:
        known = self.at(now, usual) if self.seconds is not None else None
        kept = (1.0 - WEIGHT) * self._freshness(now)
        self.seconds = sample if known is None else sample + kept * (known - sample)
        self._at_s = now

    def _freshness(self, now: float) -> float:
        return math.exp(min(0.0, self._at_s - now) / MEMORY_S)


class Paces:
    """Of the workers of one router. usual: of all; None before the first sample."""

    def __init__(self) -> None:
        self.usual: float | None = None
        self._roles = {role: Pace() for role in Role}

    def of_role(self, role: Role, now: float) -> float | None:
        """What `Pace.at` of a worker of that role is told as usual; None while nobody has shown any."""
        return self._roles[role].at(now, self.usual)

    def learn(self, own: Pace, role: Role, sample: float, now: float) -> None:
        """A prompt has shown `sample` of a worker."""
        own.learn(sample, self.of_role(role, now), now)
        shown = own.seconds or 0.0
        self._roles[role].learn(shown, self.usual, now)
        usual = shown if self.usual is None else self.usual
        self.usual = usual + WEIGHT * (shown - usual)

    def learn_at_least(self, own: Pace, role: Role, sample: float, now: float) -> None:
        """A worker takes `sample` or longer. It says nothing of others."""
        peers = self.of_role(role, now)
        if sample > (own.at(now, peers) or 0.0):
            own.learn(sample, peers, now)
