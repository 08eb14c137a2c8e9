"""Tenants' limits in tests/simulation/cluster_world.py: the server that routers share, and each router's way to it.

The quiet code is the real one (TenantLimits, SharedClaims). LimitsServer stands in for Redis and the scripts of
router/shared_limits.py, whose verdicts it must have (tests/router/test_shared_limits.py); RouterLimits stands in for
SharedLimiter and kv_transfer/bounded_redis.py.

Invariants: while the server is well, nobody gets a permit beyond its tenant's limit; in no trouble does a router give
more than the limit itself; when all is over, no permit is held anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from core.errors import Rejected
from core.request import GenerateRequest
from router.admission.limits import Permit, TenantLimits
from router.admission.policy import AdmissionPolicy, TenantPolicy
from router.admission.shared_claims import (
    TAKEN,
    TOO_MANY_OPEN,
    TOO_MANY_TOKENS,
    Answer,
    Claim,
    Return,
    SharedClaims,
)

if TYPE_CHECKING:
    from tests.simulation.cluster_world import World

TAKE_TIMEOUT_S = 0.3
WRITE_TIMEOUT_S = 0.5
BACKOFF_S = 0.5
LEASE_S = 3.0
# Since the server's last trouble: by then each router has noticed, is back, and has renewed what it has open.
WELL_AFTER_S = 2 * (WRITE_TIMEOUT_S + BACKOFF_S) + LEASE_S / 3
MOST_DEBT = 1e9

LIMITED = AdmissionPolicy(
    tenants={
        "three": TenantPolicy(max_concurrent=3),
        "slow": TenantPolicy(max_concurrent=6, tokens_per_s=8.0, burst_tokens=150),
    }
)
TENANTS = ("three", "slow", "", "")  # of requests, at random


class Leak(Exception):
    """Something is still held, or still known, when all requests are over."""


class OverLimit(Exception):
    """A tenant has more open than it may have."""


@dataclass(slots=True)
class _Bucket:
    level: float
    at_s: float


@dataclass(slots=True)
class LimitsServer:
    """What Redis keeps: leases by name, and a bucket, of each tenant."""

    leases: dict[str, dict[str, float]] = field(default_factory=dict)  # and when each ends
    buckets: dict[str, _Bucket] = field(default_factory=dict)

    def take(self, claim: Claim, lease_s: float, now: float) -> Answer:
        policy, leases = claim.policy, self.live(claim.tenant, now)
        if policy.max_concurrent is not None:
            wanted = min(len(claim.names), policy.max_concurrent)
            if len(leases) + wanted > policy.max_concurrent:
                return Answer(TOO_MANY_OPEN)
        if policy.tokens_per_s is not None:
            size = policy.bucket_tokens
            bucket = self.buckets.setdefault(claim.tenant, _Bucket(size, now))
            level = min(size, bucket.level + policy.tokens_per_s * max(0.0, now - bucket.at_s))
            missing = min(claim.num_tokens, size) - level
            if missing > 0:
                return Answer(TOO_MANY_TOKENS, missing / policy.tokens_per_s)
            bucket.level, bucket.at_s = level - claim.num_tokens, now
        leases.update(dict.fromkeys(claim.names, now + lease_s))
        return Answer(TAKEN)

    def give_back(self, back: Return) -> None:
        leases = self.leases.get(back.tenant, {})
        known = [leases.pop(name, None) for name in back.names]
        if any(known) and back.tenant in self.buckets:
            self.buckets[back.tenant].level += back.unused_tokens

    def renew(self, tenant: str, names: list[str], lease_s: float, now: float) -> None:
        self.live(tenant, now).update(dict.fromkeys(names, now + lease_s))

    def live(self, tenant: str, now: float) -> dict[str, float]:
        found = {name: ends_s for name, ends_s in self.leases.get(tenant, {}).items() if ends_s > now}
        self.leases[tenant] = found
        return found


class SharedServer:
    """The server and its troubles."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.state = LimitsServer()
        self.away = False
        self.slow = False
        self._cut_off: dict[int, float] = {}  # routers, by number, and until when
        self._trouble_until_s = 0.0
        self.num_troubles = 0

    @property
    def is_well(self) -> bool:
        """And has been for so long that it knows of all that is open."""
        return self.world.now > self._trouble_until_s + WELL_AFTER_S

    def trouble(self) -> None:
        """It is lost for a while, and may come back empty; or slow; or one router does not reach it."""
        rng, duration_s = self.world.rng, self.world.rng.uniform(0.5, 6)
        self._trouble_until_s = max(self._trouble_until_s, self.world.now + duration_s)
        self.num_troubles += 1
        match rng.randrange(3):
            case 0:
                self.away = True
                if rng.random() < 0.5:
                    self.state = LimitsServer()
            case 1:
                self.slow = True
            case 2:
                self._cut_off[rng.randrange(len(self.world.routers))] = self.world.now + duration_s
        self.world.at(duration_s, self.recover)

    def recover(self) -> None:
        if self.world.now >= self._trouble_until_s:
            self.away = self.slow = False

    def check_over(self) -> None:
        held = [name for tenant in self.state.leases for name in self.state.live(tenant, self.world.now)]
        if held:
            raise Leak(f"the server of shared limits holds {held}")

    def call(self, router: int, what: Callable[[], object], then: Callable[[object], None]) -> None:
        """It does `what`, and the router hears of that, if nothing gets lost."""
        reached = self.world.now >= self._cut_off.get(router, 0.0)
        there_s, back_s = (self.world.rng.uniform(0, 1.0 if self.slow else 0.05) for _ in range(2))

        def arrive() -> None:
            if self.away or not reached:
                return
            answer = what()
            self.world.at(back_s, lambda: then(answer))

        self.world.at(there_s, arrive)


@dataclass(eq=False)
class Asking:
    """A request that waits for its permit."""

    claim: Claim
    then: Callable[[Permit | Rejected], None]
    over: bool = False


class RouterLimits:
    """Of one life of a router."""

    def __init__(self, world: World, number: int, router_id: str, policy_of: Callable[[str], TenantPolicy]) -> None:
        self.world = world
        self.server = world.limits_server
        self.number = number
        self.own = TenantLimits(policy_of)
        self.claims = SharedClaims(router_id, self.own, policy_of)
        self.policy_of = policy_of
        self.away = False
        self.dead = False
        self.num_alone = 0
        self._renew_at_s = world.now + LEASE_S / 3

    def take(
        self, request: GenerateRequest, num_tokens: int, then: Callable[[Permit | Rejected], None]
    ) -> Asking | None:
        """None: decided at once."""
        tenant, num_choices = request.tenant, request.num_choices
        try:
            claim = self.claims.claim(tenant, num_tokens, num_choices)
            if claim is None:
                then(self.own.take(tenant, num_tokens, self.world.now, num_choices))
                return None
        except Rejected as error:
            then(error)
            return None
        asking = Asking(claim, then)
        self._bounded(
            TAKE_TIMEOUT_S,
            lambda: self.server.state.take(claim, LEASE_S, self.world.now),
            lambda answer: self._decide(asking, answer),
        )
        return asking

    def _decide(self, asking: Asking, answer: object) -> None:
        if asking.over:
            return
        asking.over = True
        assert answer is None or isinstance(answer, Answer)
        self.num_alone += answer is None
        try:
            permit = self.claims.decide(asking.claim, answer, self.world.now)
        except Rejected as error:
            if answer is None or answer.verdict == TAKEN:
                self._return(self.claims.unclaim(asking.claim))
            asking.then(error)
            return
        self._check(asking.claim.tenant, answer)
        asking.then(permit)

    def _check(self, tenant: str, answer: Answer | None) -> None:
        most = self.policy_of(tenant).max_concurrent
        if most is None:
            return
        routers = [router for router in self.world.routers if router is not None]
        open_by_router = [router.limits.num_open(tenant) for router in routers]
        if max(open_by_router) > 1 or (answer is not None and self.server.is_well and sum(open_by_router) > 1):
            raise OverLimit(f"t={self.world.now:.2f} {tenant}: {open_by_router} times {most}")

    def num_open(self, tenant: str) -> float:
        """Of what it may have; a request of more choices than may be open counts as all of them."""
        most = self.policy_of(tenant).max_concurrent
        assert most is not None
        return sum(min(permit.num_choices, most) for permit in self.own._open.get(tenant, ())) / most

    def cancel(self, asking: Asking) -> None:
        """Its client left."""
        if not asking.over:
            asking.over = True
            self._return(self.claims.unclaim(asking.claim))

    def give_back(self, permit: Permit, used_tokens: int) -> None:
        back = self.claims.give_back(permit, used_tokens, self.world.now)
        if back is not None:
            self._return(back)

    def tick(self) -> None:
        if self.world.now < self._renew_at_s:
            return
        self._renew_at_s = self.world.now + LEASE_S / 3
        for tenant, names in self.claims.open_names().items():
            self._write(lambda tenant=tenant, names=names: self._renewed(tenant, names))  # type: ignore[misc]

    def _renewed(self, tenant: str, names: list[str]) -> None:
        self.server.state.renew(tenant, names, LEASE_S, self.world.now)

    def _return(self, back: Return) -> None:
        self._write(lambda: self.server.state.give_back(back))

    def _write(self, what: Callable[[], object]) -> None:
        self._bounded(WRITE_TIMEOUT_S, what, lambda _answer: None)

    def _bounded(self, timeout_s: float, what: Callable[[], object], then: Callable[[object], None]) -> None:
        """As BoundedRedis: `then` hears the answer, or None."""
        if self.away:
            then(None)
            return
        heard: list[object] = []

        def answered(answer: object) -> None:
            if not heard and not self.dead:
                heard.append(answer)
                then(answer)

        def timed_out() -> None:
            if heard or self.dead:
                return
            heard.append(None)
            if not self.away:
                self.away = True
                self.world.at(BACKOFF_S, self._recover)
            then(None)

        self.server.call(self.number, lambda: what() or True, answered)
        self.world.at(timeout_s, timed_out)

    def _recover(self) -> None:
        """Try until it answers."""
        if not self.away or self.dead:
            return

        def back(_answer: object) -> None:
            self.away = False

        self.server.call(self.number, lambda: True, back)
        self.world.at(BACKOFF_S, self._recover)
