"""What must leave a draining worker, and when. Without clock or socket.

At once: a prompt of which nothing is computed. When the worker's time is over: whatever is there still, a stream from
its latest token on, a prompt or a hand-off that has not landed from the start. The router moves it when another worker
can have it; where none can, it stays and may finish, for as long as the worker lives.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from core.membership import Life
from router.flow import Leg, Stage
from router.view import ClusterView


def must_leave(legs: Iterable[Leg], view: ClusterView, now: float, unbegun: Collection[str] = ()) -> list[Leg]:
    """unbegun: attempts of which their workers have just said that nothing is computed."""
    draining = [worker for worker in view.workers() if worker.life is Life.DRAINING]
    if not draining:
        return []
    over = [worker.ref for worker in draining if now >= worker.move_at_s]
    refs = [worker.ref for worker in draining]
    return [
        leg
        for leg in legs
        if leg.stage not in (Stage.QUEUED, Stage.DONE)
        and (
            any(map(leg.uses, over))
            or ((leg.stage is Stage.RESERVING or leg.request.request_id in unbegun) and any(map(leg.uses, refs)))
        )
    ]
