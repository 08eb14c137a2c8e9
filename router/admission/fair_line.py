"""Deficit round robin: whose request is next, so that each tenant gets tokens by its weight.

Tenants take turns in a ring. One whose next request costs more than it has saved up saves another quantum, times its
weight, and goes to the ring's end. What it has saved is lost when nothing of it waits any more. Over any time in which
two tenants wait, their tokens by weight differ by less than a quantum and one request of each.
Source: M. Shreedhar and G. Varghese, Efficient Fair Queuing using Deficit Round Robin, SIGCOMM 1995.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from router.admission.policy import Band

QUANTUM_TOKENS: Final = 32
MOST_DEBT: Final = 256  # quanta, for what a tenant got elsewhere


@dataclass(frozen=True, slots=True)
class Waiting:
    """One request in the queue. cost: its prompt, and the output that is expected of it, in tokens."""

    request_id: str
    tenant: str
    band: Band
    cost: int
    arrived_s: float


@dataclass(slots=True)
class _Tenant:
    """Its requests in order of arrival, what they cost together, and what it has saved up."""

    items: OrderedDict[str, Waiting] = field(default_factory=OrderedDict)
    backlog: int = 0
    saved: float = 0.0

    @property
    def head(self) -> Waiting:
        return next(iter(self.items.values()))


class FairLine:
    """Those of one band. weight_of: of a tenant, now."""

    def __init__(self, weight_of: Callable[[str], float]) -> None:
        self._weight_of = weight_of
        self._tenants: dict[str, _Tenant] = {}
        self._ring: deque[str] = deque()  # of those in _tenants; the first one's turn is next
        self._length = 0
        self.backlog = 0  # tokens

    def __len__(self) -> int:
        return self._length

    def push(self, item: Waiting) -> None:
        tenant = self._tenants.get(item.tenant)
        if tenant is None:
            tenant = self._tenants[item.tenant] = _Tenant(saved=self._quantum(item.tenant))
            self._ring.append(item.tenant)
        tenant.items[item.request_id] = item
        tenant.backlog += item.cost
        self._length += 1
        self.backlog += item.cost

    def remove(self, item: Waiting) -> None:
        """Take out one that waits here."""
        tenant = self._tenants[item.tenant]
        del tenant.items[item.request_id]
        tenant.backlog -= item.cost
        self._length -= 1
        self.backlog -= item.cost
        if not tenant.items:
            del self._tenants[item.tenant]
            self._ring.remove(item.tenant)

    def pop(self) -> Waiting:
        """Take out the next one; the line must not be empty."""
        self._save_rounds()
        while True:
            tenant = self._tenants[self._ring[0]]
            head = tenant.head
            if head.cost <= tenant.saved:
                tenant.saved -= head.cost
                self.remove(head)
                return head
            tenant.saved += self._quantum(head.tenant)
            self._ring.rotate(-1)

    def charge(self, tenant: str, cost: int) -> None:
        """It got so much elsewhere. Whoever waits nowhere else does not pay for that for ever."""
        known = self._tenants.get(tenant)
        if known is not None:
            known.saved = max(known.saved - cost, -MOST_DEBT * self._quantum(tenant))

    def oldest_s(self) -> float:
        """When the one came that waits longest; infinity when none waits."""
        return min((tenant.head.arrived_s for tenant in self._tenants.values()), default=math.inf)

    def share_of_backlog(self, tenant: str, cost: int = 0) -> float:
        """What waits of a tenant, and `cost` more, by its weight."""
        known = self._tenants.get(tenant)
        return ((known.backlog if known else 0) + cost) / self._weight_of(tenant)

    def longest(self) -> Waiting:
        """The newest request of the tenant with most waiting, by weight; the line must not be empty."""
        name = max(self._tenants, key=self.share_of_backlog)
        return next(reversed(self._tenants[name].items.values()))

    def tokens_before(self, tenant: str, cost: int, coming: Mapping[str, float] = MappingProxyType({})) -> float:
        """About how many go before a request of `tenant` that comes now: its own, and of each other's as many as get
        their turn meanwhile. coming: tokens that tenants will ask for until then."""
        mine = self.share_of_backlog(tenant, cost)
        others = 0.0
        for name in dict.fromkeys((*self._tenants, *coming)):
            if name != tenant:
                waits = self._tenants[name].backlog if name in self._tenants else 0
                others += min(waits + coming.get(name, 0.0), mine * self._weight_of(name))
        return mine * self._weight_of(tenant) - cost + others

    def turn_s(self, newcomer: Waiting, wait_s: float, max_wait_s: float) -> float:
        """When the turn of `newcomer` comes, that comes now. wait_s: if all who wait get theirs; but who has waited
        `max_wait_s` before that leaves, as after a burst most of it does. Only its own tenant's: of others' work no
        more goes before it than its own."""
        known = self._tenants.get(newcomer.tenant)
        if known is None or newcomer.arrived_s + wait_s <= known.head.arrived_s + max_wait_s:
            return wait_s
        token_s = wait_s / (known.backlog + newcomer.cost)
        served = 0
        for item in known.items.values():
            if newcomer.arrived_s + (served + item.cost) * token_s <= item.arrived_s + max_wait_s:
                served += item.cost
        return (served + newcomer.cost) * token_s

    def _quantum(self, tenant: str) -> float:
        return QUANTUM_TOKENS * self._weight_of(tenant)

    def _save_rounds(self) -> None:
        """Where a request costs many quanta: all rounds at once in which everybody would only save."""
        rounds = min(
            math.ceil((tenant.head.cost - tenant.saved) / self._quantum(name)) for name, tenant in self._tenants.items()
        )
        if rounds > 1:
            for name, tenant in self._tenants.items():
                tenant.saved += (rounds - 1) * self._quantum(name)
