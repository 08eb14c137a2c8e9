"""Who holds the tenants' limits: this router alone, or all replicas together."""

from __future__ import annotations

import time
from typing import Protocol

from router.admission.limits import Permit, TenantLimits


class Limiter(Protocol):
    """What a request needs before it may wait for its turn."""

    async def take(self, tenant: str, num_tokens: int, num_choices: int = 1) -> Permit:
        """Returns within a bound, whoever is asked. Raises: Rejected: the tenant has what it may have."""
        ...

    def give_back(self, permit: Permit, used_tokens: int) -> None:
        """Its request is over; waits for nothing, because the client may be gone."""
        ...

    async def close(self) -> None:
        """Disconnect."""
        ...


class OwnLimiter:
    """This router's own books."""

    def __init__(self, limits: TenantLimits) -> None:
        self._limits = limits

    async def take(self, tenant: str, num_tokens: int, num_choices: int = 1) -> Permit:
        return self._limits.take(tenant, num_tokens, time.monotonic(), num_choices)

    def give_back(self, permit: Permit, used_tokens: int) -> None:
        self._limits.give_back(permit, used_tokens, time.monotonic())

    async def close(self) -> None:
        pass
