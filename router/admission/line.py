"""The router's queue: two bands, in each the tenants in turn, bounded by size.

Interactive work goes first. Batch work that has waited `batch_ageing_s` gets one token for every `BATCH_SHARE` of
interactive work from then on, so that it never starves, and never takes more than that from who waits for an answer.
"""

from __future__ import annotations

from typing import Final

from core.errors import Rejected, RejectReason
from router.admission.fair_line import FairLine, Waiting
from router.admission.forecast import Arrivals
from router.admission.policy import AdmissionPolicy, Band

BATCH_SHARE: Final = 8
ROUNDS: Final = 3  # of a forecast: in a longer wait more comes, which is waited for


class Line:
    """Requests without workers that have not had their turn. `policy` may be replaced at any time."""

    def __init__(self, policy: AdmissionPolicy) -> None:
        self.policy = policy
        self._bands = {band: FairLine(lambda name: self.policy.tenant(name).weight) for band in Band}
        self._items: dict[str, Waiting] = {}
        self._arrivals = {band: Arrivals() for band in Band}
        self._batch_credit = 0.0  # tokens; negative after one that cost more than it had

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._items

    @property
    def backlog(self) -> int:
        """What all of it costs, in tokens."""
        return sum(line.backlog for line in self._bands.values())

    def lengths(self) -> dict[str, int]:
        """How many wait, by band."""
        return {band: len(line) for band, line in self._bands.items()}

    def push(self, item: Waiting) -> Waiting | None:
        """Queue a request. Returns: the one that had to make room for it.

        Raises: Rejected: the queue is full, and it is `item` that has the least right to be there.
        """
        shed = self._surplus(item) if len(self) >= self.policy.queue.max_waiting else None
        if shed is item:
            raise Rejected(RejectReason.QUEUE_FULL, f"{len(self)} requests wait")
        if shed is not None:
            self.remove(shed.request_id)
        self._items[item.request_id] = item
        self._arrivals[item.band].came(item.tenant, item.cost, item.arrived_s)
        self._bands[item.band].push(item)
        return shed

    def remove(self, request_id: str) -> None:
        """It waits no longer, if it did."""
        item = self._items.pop(request_id, None)
        if item is not None:
            self._bands[item.band].remove(item)

    def charge(self, tenant: str, band: Band, cost: int) -> None:
        """It got so much at another router."""
        self._bands[band].charge(tenant, cost)

    def pop(self, now: float) -> Waiting:
        """Take out the next one; the queue must not be empty."""
        interactive, batch = self._bands[Band.INTERACTIVE], self._bands[Band.BATCH]
        aged = batch.oldest_s() <= now - self.policy.queue.batch_ageing_s
        if not interactive or (aged and self._batch_credit > 0):
            item = batch.pop()
            self._batch_credit -= item.cost if interactive else 0
        else:
            item = interactive.pop()
            if aged:
                self._batch_credit += item.cost / BATCH_SHARE
        del self._items[item.request_id]
        return item

    def wait_s(self, item: Waiting, tokens_per_s: float) -> float:
        """About how long `item` waits if it comes now: for what is there and stays until its turn, and for what others
        bring until then and goes before it, if they go on as of late. tokens_per_s: that leave the line."""
        rates = {band: arrivals.tokens_per_s(item.arrived_s) for band, arrivals in self._arrivals.items()}
        above = self._bands[Band.INTERACTIVE].backlog if item.band is Band.BATCH else 0
        above_rate = sum(rates[Band.INTERACTIVE].values()) if item.band is Band.BATCH else 0.0
        wait_s = 0.0
        for _ in range(ROUNDS):
            coming = {tenant: rate * wait_s for tenant, rate in rates[item.band].items()}
            own = self._bands[item.band].tokens_before(item.tenant, item.cost, coming)
            wait_s = (above + above_rate * wait_s + own) / tokens_per_s
        return self._bands[item.band].turn_s(item, wait_s, self.policy.queue.band(item.band).max_wait_s)

    def _surplus(self, item: Waiting) -> Waiting:
        """Of those who wait and `item`, the one to turn away: batch work first, then the tenant with most waiting."""
        batch, own = self._bands[Band.BATCH], self._bands[item.band]
        if item.band is Band.INTERACTIVE and batch:
            return batch.longest()
        longest = own.longest() if own else item
        mine = own.share_of_backlog(item.tenant, item.cost)
        return longest if own.share_of_backlog(longest.tenant) > mine else item
