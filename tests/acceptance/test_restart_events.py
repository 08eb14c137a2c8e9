"""Workers that restart while what they say of their caches comes late, twice, out of order or not at all: requests go
by it, and a router believes nothing of a cache that is not so, nor anything of the dead.

On virtual time, whole clusters (tests/simulation/cluster_world.py, which looks into every router's view at the end).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from core.messages import CacheEvents
from router.prefix_view import PrefixView
from tests.simulation.cluster_world import Faults
from tests.simulation.test_cluster_world import believe_the_dead, run_world, take_events_as_they_come

NUM_SEEDS = 5
FAULTS = Faults(
    lose_events=0.2, double_events=0.2, reorder_events=0.2, num_disturbances=8, num_drains=0, cancel=0.0, reuse_id=0.0
)


def test_what_a_router_believes_of_caches_is_so_however_their_events_come(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[str] = Counter()
    hear = PrefixView.hear

    def note(self: PrefixView, slot: int, events: CacheEvents | None, now: float) -> bool:
        if events is not None and not events.reset:
            ahead = events.sequence - self._told[slot].last
            seen["in order" if ahead == 1 else "lost or overtaken" if ahead > 1 else "stale or doubled"] += 1
        return hear(self, slot, events, now)

    monkeypatch.setattr(PrefixView, "hear", note)
    for seed in range(NUM_SEEDS):
        world = run_world(seed, FAULTS)
        seen["restarts"] += len(world.deaths)
        seen["finished"] += sum(client.finished for client in world.clients)
    ways = ("in order", "lost or overtaken", "stale or doubled", "restarts", "finished")
    assert all(seen[way] for way in ways), seen


@pytest.mark.parametrize("plant", [take_events_as_they_come, believe_the_dead])
def test_a_router_that_believes_what_comes_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(Exception, match=r"cached"):
        for seed in range(NUM_SEEDS):
            run_world(seed, FAULTS)
