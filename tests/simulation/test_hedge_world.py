"""Slow workers, and second attempts beside a first one whose first token does not come: every stream is still its
undisturbed run, the loser is cancelled everywhere, few requests are computed twice, and first tokens come sooner.

A failing seed is reproduced by `TANDEM_SEED=N pytest tests/simulation/test_hedge_world.py`.
"""

from __future__ import annotations

import os
import statistics
from collections import Counter
from dataclasses import replace

import pytest

import router.planner
from router.dispatcher import Dispatcher
from router.hedging import HedgeBudget
from router.open_requests import OpenRequests
from router.planner import Planner
from router.policy.routing_policy import HedgePolicy, RoutingPolicy
from tests.simulation.cluster_world import NO_FAULTS, Faults, World
from tests.simulation.world_host import WorkForNobody
from tests.simulation.world_limits import Leak
from tests.simulation.world_router import WrongHedge

NUM_SEEDS = 20
NUM_REQUESTS = 20
FAULTS = Faults(num_slow=6, num_disturbances=2, num_drains=1)
HEDGED = RoutingPolicy(hedge=HedgePolicy(after_s=0.8, times_predicted=1.5, max_share=0.4))
CHOICES = (1, 1, 3)
ONLY_SLOW = replace(NO_FAULTS, num_slow=6)


def walk(seeds: range, faults: Faults = FAULTS, routing: RoutingPolicy = HEDGED) -> tuple[Counter[str], list[float]]:
    """What was seen, and the times to first tokens."""
    seen: Counter[str] = Counter()
    ttfts_s: list[float] = []
    for seed in seeds:
        world = World(seed, faults, choices=CHOICES, num_routers=1 + seed % 2, routing=routing)
        try:
            world.run(NUM_REQUESTS)
        except BaseException as error:
            error.add_note(f"t={world.now:.2f}: TANDEM_SEED={seed} pytest tests/simulation/test_hedge_world.py")
            raise
        seen += world.hedges
        for client in world.clients:
            seen["finished"] += client.finished
            if client.finished:
                ttfts_s.append(client.first_s - client.submitted_s)
    return seen, ttfts_s


def test_streams_with_hedges_are_their_undisturbed_runs() -> None:
    chosen = os.environ.get("TANDEM_SEED")
    seen, _ = walk(range(int(chosen), int(chosen) + 1) if chosen else range(NUM_SEEDS))
    assert chosen or all(seen[way] for way in ("finished", "begun", "won", "lost")), seen
    assert chosen or seen["begun"] > seen["won"] + seen["lost"]  # some lost their workers, or their clients


def test_hedges_bring_first_tokens_sooner_where_workers_are_slow() -> None:
    seen, hedged = walk(range(8), ONLY_SLOW)
    none, plain = walk(range(8), ONLY_SLOW, RoutingPolicy())
    assert seen["won"] and not none["begun"]
    assert p95(hedged) < 0.7 * p95(plain)  # 2.1 s and 3.9 s


def p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]


def let_losers_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the router's books know that an attempt has lost."""
    monkeypatch.setattr(OpenRequests, "drop", lambda self, leg: self.close(leg) or [])


def let_both_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first token ends nothing."""
    monkeypatch.setattr(Dispatcher, "_outrun", lambda *_: [])


def hedge_without_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HedgeBudget, "begun", lambda self: None)


def hedge_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second attempt on whatever workers are best."""
    monkeypatch.setattr(Planner, "_other_way", Planner.choose)


def hedge_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Second attempts at what is out already."""
    monkeypatch.setattr(router.planner, "is_late", lambda leg, policy, pace, now: leg.plan and now - leg.begun_s > 0.8)


@pytest.mark.parametrize(
    ("plant", "seen_as"),
    [
        (let_losers_run, WorkForNobody),
        (let_both_run, Leak),
        (hedge_without_a_budget, WrongHedge),
        (hedge_where_it_is, WrongHedge),
        (hedge_streams, WrongHedge),
    ],
)
def test_the_walk_finds_a_planted_bug(plant, seen_as: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    plant(monkeypatch)
    with pytest.raises(seen_as):
        walk(range(NUM_SEEDS))
