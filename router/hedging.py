"""When a request gets a second attempt beside its first: no token has come for long. Told the time.

The first token of either ends the other (router/dispatcher.py). How many may is bounded as a share of all requests, so
that a cluster that is slow as a whole does not compute everything twice.
"""

from __future__ import annotations

from typing import Final

from router.flow import Leg, Stage
from router.policy.routing_policy import HedgePolicy

MOST_SAVED: Final = 8.0  # hedges, of the budget: as many requests may be at one worker that hangs


class HedgeBudget:
    """One hedge at first, then a share of the requests that came."""

    def __init__(self) -> None:
        self._saved = 1.0

    def came(self, policy: HedgePolicy | None) -> None:
        """A request got its workers."""
        if policy is not None:
            self._saved = min(MOST_SAVED, self._saved + policy.max_share)

    @property
    def allows_one(self) -> bool:
        return self._saved >= 1.0

    def begun(self) -> None:
        """A hedge."""
        self._saved -= 1.0


def is_late(leg: Leg, policy: HedgePolicy, usual_pace: float | None, now: float) -> bool:
    """Its first token might come sooner from others. usual_pace: Paces.usual."""
    if leg.plan is None or leg.rival is not None or not leg.prefill_open or leg.stage in (Stage.QUEUED, Stage.DONE):
        return False
    if leg.request.output_token_ids or any(output.tokens or output.early for output in leg.outputs):
        return False
    way = leg.plan.scores[0]
    predicted_s = (way.work + way.uncached + way.transfer) * (usual_pace or 0.0)
    return now - leg.begun_s >= max(policy.after_s, policy.times_predicted * predicted_s)
