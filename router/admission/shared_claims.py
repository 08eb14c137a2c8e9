"""What a router asks the server of shared limits for, and what it makes of the answer. Told the time; no socket.

1. `claim`: the request's tenant has limits, so the server is asked, under a name that was never used before.
2. `decide`: its answer, or that none came: then this router's own books decide, which go on beside.
3. `unclaim`: no answer came, or nobody waits for it any more: the server may have given the permit all the same.
4. `give_back`: the request is over.
Until then `open_names` says which leases to renew. A router never has more open than its own books allow, whatever a
server says that has lost what it knew.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from router.admission.limits import Permit, TenantLimits
from router.admission.policy import TenantPolicy

TOO_MANY_OPEN: Final = "open"
TOO_MANY_TOKENS: Final = "tokens"
TAKEN: Final = "taken"


@dataclass(frozen=True, slots=True)
class Claim:
    """names: of the permit at the server, one for each choice. policy: of its tenant when it asked."""

    names: tuple[str, ...]
    tenant: str
    policy: TenantPolicy
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Return:
    """To tell the server: a permit is over. unused_tokens: what it was charged with and did not use."""

    names: tuple[str, ...]
    tenant: str
    unused_tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    """verdict: TAKEN, TOO_MANY_OPEN, or TOO_MANY_TOKENS, for `wait_s` more."""

    verdict: str
    wait_s: float = 0.0


class SharedClaims:
    """Of one router; no other one, nor another life of it, has its `router_id`. own: its own books. policy_of: a
    tenant's limits, now."""

    def __init__(self, router_id: str, own: TenantLimits, policy_of: Callable[[str], TenantPolicy]) -> None:
        self._router_id = router_id
        self._own = own
        self._policy_of = policy_of
        self._serials = itertools.count(1)
        self._open: dict[Permit, tuple[str, ...]] = {}  # and its names

    def claim(self, tenant: str, num_tokens: int, num_choices: int) -> Claim | None:
        """What to ask the server; None: nothing, as the tenant has no limits.

        Raises: Rejected: this router alone has as many of the tenant's requests open as all may have.
        """
        policy = self._policy_of(tenant)
        if policy.max_concurrent is None and policy.tokens_per_s is None:
            return None
        self._own.require_place(tenant, policy, num_choices)
        names = tuple(f"{self._router_id}.{next(self._serials)}" for _ in range(num_choices))
        return Claim(names, tenant, policy, num_tokens)

    def decide(self, claim: Claim, answer: Answer | None, now: float) -> Permit:
        """Raises: Rejected: the tenant has what it may have."""
        if answer is None:
            permit = self._own.take(claim.tenant, claim.num_tokens, now, len(claim.names))
        elif answer.verdict == TOO_MANY_OPEN:
            raise self._own.too_many_open(claim.tenant, claim.policy)
        elif answer.verdict == TOO_MANY_TOKENS:
            raise self._own.too_many_tokens(claim.tenant, claim.policy, answer.wait_s)
        else:
            self._own.require_place(claim.tenant, claim.policy, len(claim.names))  # others came while it was asked
            permit = self._own.admit(claim.tenant, claim.policy, claim.num_tokens, now, len(claim.names))
        self._open[permit] = claim.names
        return permit

    def unclaim(self, claim: Claim) -> Return:
        return Return(claim.names, claim.tenant, claim.num_tokens)

    def give_back(self, permit: Permit, used_tokens: int, now: float) -> Return | None:
        """None: the server does not know of it."""
        self._own.give_back(permit, used_tokens, now)
        names = self._open.pop(permit, None)
        return None if names is None else Return(names, permit.tenant, permit.charged_tokens - used_tokens)

    def open_names(self) -> dict[str, list[str]]:
        """By tenant."""
        found: dict[str, list[str]] = {}
        for permit, names in self._open.items():
            found.setdefault(permit.tenant, []).extend(names)
        return found
