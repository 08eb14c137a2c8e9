"""Policies that change while requests wait and run, to anything that the file may say: tenants come and go under their
own requests, bounds shrink below what is there, costs go to their ends. Nobody is lost, held up or counted wrong."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace

import pytest

from core.request import GenerateRequest, Placement
from router.admission.policy import AdmissionPolicy, BandPolicy, QueuePolicy, TenantPolicy
from router.policy.routing_policy import MOST, HedgePolicy, RoutingPolicy
from tests.simulation.cluster_world import Faults, World
from tests.simulation.world_client import Client
from tests.simulation.world_router import Router

NUM_SEEDS = 30
NUM_REQUESTS = 20
TENANTS = "abcd"
PRIORITIES = (0, 0, 1, -1, 5)
CHOICES = (1, 3, 1, 1, 2)


class PolicyWorld(World):
    """Every router reads another policy every now and then."""

    def run(self, num_requests: int) -> None:
        self.at(0.5, self.change)
        super().run(num_requests)

    def change(self) -> None:
        for router in self.routers:
            if router is not None:
                router.dispatcher.admission.policy = self._admission()
                router.dispatcher.planner.routing = self._routing()
        self.at(self.rng.uniform(0.2, 3), self.change)

    def ask(self, router: Router | None, request: GenerateRequest, placement: Placement = Placement.AUTO) -> Client:
        session_id = self.rng.choice(["", "s1", "s2"])
        return super().ask(router, replace(request, tenant=self.rng.choice(TENANTS), session_id=session_id), placement)

    def _admission(self) -> AdmissionPolicy:
        choose = self.rng.choice
        patience = BandPolicy(max_wait_s=choose([0.01, 1.0, 10.0]), max_ttft_s=choose([None, 0.01, 5.0]))
        queue = QueuePolicy(
            max_waiting=choose([1, 2, 1000]),
            interactive=patience,
            batch=BandPolicy(max_wait_s=choose([0.01, 10.0])),
            batch_ageing_s=choose([0.1, 100.0]),
            tokens_ahead=choose([None, 1, 10**9]),
        )
        known = [name for name in TENANTS if self.rng.random() < 0.6]
        weights = [0.01, 1.0, 1000.0]
        return AdmissionPolicy(tenants={name: TenantPolicy(weight=choose(weights)) for name in known}, queue=queue)

    def _routing(self) -> RoutingPolicy:
        choose = self.rng.choice
        return RoutingPolicy(
            local_prefill_cost=choose([None, 1.0, MOST]),
            overlap_weight=choose([0.0, 1.0]),
            host_overlap_weight=self.tier_rng.choice([0.0, 1.0]),
            disk_overlap_weight=self.tier_rng.choice([0.0, 1.0]),
            kv_token_cost=choose([0.0, 1000.0]),
            transfer_weight=choose([0.0, 1000.0]),
            imbalance=choose([1.0, MOST]),
            affinity_tokens=choose([0.0, MOST]),
            stale_after_s=choose([0.01, 60.0]),
            hedge=choose([None, HedgePolicy(after_s=choose([0.01, 1.0]), times_predicted=1.0, max_share=1.0)]),
        )


def walk(seeds: range) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        world = PolicyWorld(seed, Faults(), PRIORITIES, CHOICES, num_routers=1 + seed % 2)
        try:
            world.run(NUM_REQUESTS)
        except BaseException as error:
            error.add_note(f"t={world.now:.2f}: TANDEM_SEED={seed} pytest tests/simulation/test_policy_world.py")
            raise
        for client in world.clients:
            seen["finished"] += client.finished
            seen["migrated"] += client.finished and client.num_migrations > 0
            seen[str(getattr(client.error, "reason", None))] += 1
    return seen


def test_a_policy_may_change_to_anything_at_any_time() -> None:
    chosen = os.environ.get("TANDEM_SEED")
    seen = walk(range(int(chosen), int(chosen) + 1) if chosen else range(NUM_SEEDS))
    ways = ("finished", "migrated", "queue_timeout", "shed", "slow_first_token")
    assert chosen or all(seen[way] for way in ways), seen


def test_the_walk_finds_a_policy_that_forgets_who_has_requests_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AdmissionPolicy, "tenant", lambda self, name: self.tenants[name])
    with pytest.raises(KeyError):
        walk(range(NUM_SEEDS))
