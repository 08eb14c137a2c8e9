"""Routers that share their tenants' limits, while the server of these is lost, slow, empty or out of a router's reach.

A failing seed is reproduced by `TANDEM_SEED=N pytest tests/simulation/test_limits_world.py`.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace

import pytest

from core.errors import Rejected
from router.admission.limits import Permit, TenantLimits
from router.admission.shared_claims import SharedClaims
from tests.simulation.cluster_world import Faults, World
from tests.simulation.world_limits import LIMITED, Leak, OverLimit

NUM_SEEDS = 15
NUM_REQUESTS = 45
FAULTS = Faults(num_limit_troubles=4, num_disturbances=2, num_drains=1)
CHOICES = (1, 1, 2, 1, 5)


def walk(seeds: range, faults: Faults = FAULTS) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        world = World(seed, faults, choices=CHOICES, num_routers=2, admission=LIMITED)
        try:
            world.run(NUM_REQUESTS)
        except BaseException as error:
            error.add_note(f"t={world.now:.2f}: TANDEM_SEED={seed} pytest tests/simulation/test_limits_world.py")
            raise
        seen["alone"] += sum(router.limits.num_alone for router in world.routers if router is not None)
        for client in world.clients:
            seen["finished"] += client.finished and client.request.tenant != ""
            if isinstance(client.error, Rejected):
                seen[client.error.reason] += 1
    return seen


def test_no_tenant_is_over_its_limit_and_every_permit_comes_back_whatever_becomes_of_the_server() -> None:
    chosen = os.environ.get("TANDEM_SEED")
    seen = walk(range(int(chosen), int(chosen) + 1) if chosen else range(NUM_SEEDS))
    ways = ("finished", "alone", "tenant_concurrency", "tenant_tokens")
    assert chosen or all(seen[way] for way in ways), seen


def test_without_trouble_no_router_is_ever_alone() -> None:
    seen = walk(range(5), replace(FAULTS, num_limit_troubles=0))
    assert seen["finished"] and seen["tenant_concurrency"] and not seen["alone"], seen


def keep_what_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that goes on to renew the lease of a permit that is over."""
    give_back = SharedClaims.give_back

    def keep(self: SharedClaims, permit, used_tokens: int, now: float):  # type: ignore[no-untyped-def]
        known = dict(self._open)
        back = give_back(self, permit, used_tokens, now)
        self._open = known
        return back

    monkeypatch.setattr(SharedClaims, "give_back", keep)


def believe_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that does not look into its own books, when the server has lost what it knew."""
    require_place, take = TenantLimits.require_place, TenantLimits.take

    def take_alone(self: TenantLimits, tenant: str, num_tokens: int, now: float, num_choices: int = 1) -> Permit:
        require_place(self, tenant, self._policy_of(tenant), num_choices)
        return take(self, tenant, num_tokens, now, num_choices)

    monkeypatch.setattr(TenantLimits, "take", take_alone)
    monkeypatch.setattr(TenantLimits, "require_place", lambda *_: None)


def forget_what_was_taken_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is back does not hear of permits that routers gave meanwhile."""
    decide = SharedClaims.decide

    def forget(self: SharedClaims, claim, answer, now: float):  # type: ignore[no-untyped-def]
        permit = decide(self, claim, answer, now)
        if answer is None:
            del self._open[permit]
        return permit

    monkeypatch.setattr(SharedClaims, "decide", forget)


@pytest.mark.parametrize(
    ("plant", "seen_as"),
    [
        (keep_what_is_given_back, Leak),
        (believe_the_server, OverLimit),
        (forget_what_was_taken_alone, OverLimit),
    ],
)
def test_the_walk_finds_a_planted_bug(plant, seen_as: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    plant(monkeypatch)
    with pytest.raises(seen_as):
        walk(range(100))
