"""Who is READY, as a fleet knows it."""

from __future__ import annotations

from cluster.fleet import Fleet
from core.membership import Life, WorkerRef


def ready_workers(fleet: Fleet) -> dict[str, WorkerRef]:
    """By place."""
    places = fleet._places.values()
    return {it.worker_id: it.ref for it in places if it.ref is not None and it.life is Life.READY}
