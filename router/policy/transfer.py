"""How long requests wait for their KV, of the time that moving it takes: learnt by lane from hand-offs that finished.

Most of a transfer is hidden behind computing the rest of the prompt; how much differs between lanes, and a probe at
connect does not show it. A hand-off shows it: the prefill worker's token came, then the decode worker's first, then the
next. What the first of these took longer than the next, the request waited for its KV. Told the time; no clock.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

FIRST_SHARE: Final = 0.5  # before anything was learnt
MOST_SHARE: Final = 100.0
KEPT: Final = 0.9  # of what was known, at each hand-off
MEMORY_S: Final = 300.0  # what is older counts for a third: a lane that is not used gets its chance again
MOST_LANES: Final = 16


@dataclass(slots=True)
class HandoffWatch:
    """Of one hand-off. kv_bytes: that the decode worker got, by its own word; 0 until it has a token."""

    prefilled_s: float
    kv_bytes: int = 0
    landed_s: float = 0.0

    def landed(self, kv_bytes: int, now: float) -> None:
        """The decode worker's first token is here."""
        self.kv_bytes, self.landed_s = kv_bytes, now

    def exposed_s(self, now: float) -> float:
        """What the request waited for its KV, now that the decode worker's second token is here."""
        return max(0.0, (self.landed_s - self.prefilled_s) - (now - self.landed_s))


@dataclass(slots=True)
class _Lane:
    """Decaying sums over its hand-offs."""

    num_handoffs: float = 0.0
    taken_s: float = 0.0
    exposed_s: float = 0.0
    at_s: float = 0.0

    def share(self, now: float) -> float:
        known = self.num_handoffs * math.exp(-(now - self.at_s) / MEMORY_S)
        learnt = min(self.exposed_s / self.taken_s, MOST_SHARE) if self.taken_s else FIRST_SHARE
        return (known * learnt + FIRST_SHARE) / (known + 1.0)

    def learn(self, taken_s: float, exposed_s: float, now: float) -> None:
        kept = KEPT * math.exp(-(now - self.at_s) / MEMORY_S)
        self.num_handoffs = kept * self.num_handoffs + 1.0
        self.taken_s = kept * self.taken_s + taken_s
        self.exposed_s = kept * self.exposed_s + exposed_s
        self.at_s = now


class ExposedShares:
    """Of all lanes that workers have named, the latest used last."""

    def __init__(self) -> None:
        self._lanes: OrderedDict[str, _Lane] = OrderedDict()

    def learn(self, lane: str, taken_s: float, exposed_s: float, now: float) -> None:
        """A hand-off has ended. taken_s: moving its bytes, by the probe; exposed_s: as HandoffWatch."""
        if taken_s <= 0.0:
            return
        known = self._lanes.setdefault(lane, _Lane(at_s=now))
        known.learn(taken_s, exposed_s, now)
        self._lanes.move_to_end(lane)
        if len(self._lanes) > MOST_LANES:
            self._lanes.popitem(last=False)

    def by_lane(self, now: float) -> Mapping[str, float]:
        """Of a lane that is not there: FIRST_SHARE."""
        return {name: lane.share(now) for name, lane in self._lanes.items()}
