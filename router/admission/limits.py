"""What each tenant may have open, and how many tokens it may use in the long run. Told the time.

A permit is charged with what its request is expected to take, and corrected when it is given back; so a tenant may
come into debt, which it pays off before it gets the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from core.errors import InvariantBroken, Rejected, RejectReason
from router.admission.policy import TenantPolicy

LEAST_WAIT_S: Final = 0.1  # a retry without a pause would only be refused again
MOST_WAIT_S: Final = 86_400.0
FIRST_HOLD_S: Final = 1.0
HOLD_WEIGHT: Final = 0.1  # of the newest


@dataclass(frozen=True, slots=True, eq=False)
class Permit:
    """One request's right to be open; given back exactly once. charged_tokens: taken from its tenant's rate.
    num_choices: each counts as open."""

    tenant: str
    charged_tokens: int
    num_choices: int
    taken_s: float


class _Bucket:
    """Full at first. `level` may be negative: what was used beyond it."""

    def __init__(self, policy: TenantPolicy, now: float) -> None:
        self.level = policy.bucket_tokens
        self._at_s = now

    def refill(self, policy: TenantPolicy, now: float) -> None:
        gained = (policy.tokens_per_s or 0.0) * max(0.0, now - self._at_s)
        self.level = min(policy.bucket_tokens, self.level + gained)
        self._at_s = now


class TenantLimits:
    """Permits of every tenant. policy_of: its limits, now."""

    def __init__(self, policy_of: Callable[[str], TenantPolicy]) -> None:
        self._policy_of = policy_of
        self._open: dict[str, set[Permit]] = {}
        self._buckets: dict[str, _Bucket] = {}
        self._hold_s: dict[str, float] = {}  # mean, by tenant

    def num_open(self, tenant: str) -> int:
        """Choices of its open requests."""
        return sum(permit.num_choices for permit in self._open.get(tenant, ()))

    def require_place(self, tenant: str, policy: TenantPolicy, num_choices: int = 1) -> None:
        """A request of more choices than may be open goes when nothing else is. Raises: Rejected: as take."""
        most = policy.max_concurrent
        if most is not None and self.num_open(tenant) + min(num_choices, most) > most:
            raise self.too_many_open(tenant, policy)

    def take(self, tenant: str, num_tokens: int, now: float, num_choices: int = 1) -> Permit:
        """Raises: Rejected: with the time after which a permit is likely to be there."""
        policy = self._policy_of(tenant)
        self.require_place(tenant, policy, num_choices)
        if policy.tokens_per_s is not None:
            # A request that is larger than the bucket goes when that is full.
            missing = min(num_tokens, policy.bucket_tokens) - self._bucket(tenant, policy, now).level
            if missing > 0:
                raise self.too_many_tokens(tenant, policy, missing / policy.tokens_per_s)
        return self.admit(tenant, policy, num_tokens, now, num_choices)

    def admit(self, tenant: str, policy: TenantPolicy, num_tokens: int, now: float, num_choices: int = 1) -> Permit:
        """Take a permit that is known to be there."""
        if policy.tokens_per_s is None:
            self._buckets.pop(tenant, None)
        else:
            self._bucket(tenant, policy, now).level -= num_tokens
        permit = Permit(tenant, num_tokens, num_choices, now)
        self._open.setdefault(tenant, set()).add(permit)
        return permit

    def too_many_open(self, tenant: str, policy: TenantPolicy) -> Rejected:
        """With the time after which one of them has likely ended."""
        return Rejected(
            RejectReason.TENANT_CONCURRENCY,
            f"tenant {tenant!r} may have {policy.max_concurrent} outputs open",
            _bounded(self._hold_s.get(tenant, FIRST_HOLD_S) / (policy.max_concurrent or 1)),
        )

    def too_many_tokens(self, tenant: str, policy: TenantPolicy, wait_s: float) -> Rejected:
        return Rejected(
            RejectReason.TENANT_TOKENS,
            f"tenant {tenant!r} has used its {policy.tokens_per_s:g} tokens/s",
            _bounded(wait_s),
        )

    def give_back(self, permit: Permit, used_tokens: int, now: float) -> None:
        """Its request is over. used_tokens: what it took in the end. Raises InvariantBroken: it was given back."""
        held = self._open.get(permit.tenant, set())
        if permit not in held:
            raise InvariantBroken(f"a permit of tenant {permit.tenant!r} is given back twice")
        held.remove(permit)
        if not held:
            del self._open[permit.tenant]
        known = self._hold_s.get(permit.tenant, now - permit.taken_s)
        self._hold_s[permit.tenant] = known + HOLD_WEIGHT * (now - permit.taken_s - known)
        bucket = self._buckets.get(permit.tenant)
        if bucket is not None:
            bucket.level += permit.charged_tokens - used_tokens

    def _bucket(self, tenant: str, policy: TenantPolicy, now: float) -> _Bucket:
        bucket = self._buckets.setdefault(tenant, _Bucket(policy, now))
        bucket.refill(policy, now)
        return bucket


def _bounded(wait_s: float) -> float:
    return min(max(LEAST_WAIT_S, wait_s), MOST_WAIT_S)
