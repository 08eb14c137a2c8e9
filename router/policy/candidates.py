"""Which workers are looked at for a request: those that are usable, and of many the few that can be the best choice.

With a thousand workers not every pair can be weighed. A good one is among the least loaded, those that cache the
longest runs of the prompt, the session's own, and of prefill workers the least loaded near each decode worker: nobody
else is best in any term of the cost.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import Final

from core.identity import Adapter
from core.membership import Role
from router.policy.affinity import own_place
from router.policy.routing_policy import RoutingPolicy
from router.prefix_view import Run, blocks_below, blocks_held
from router.view import ClusterView
from router.worker_view import WorkerView

WIDTH: Final = 6  # workers looked at of each kind and role
FEW: Final = 32  # holders of a run that are looked at one by one


Work = Callable[[WorkerView], int]
_prompt_tokens: Final[Work] = attrgetter("prompt_tokens")
_kv_tokens: Final[Work] = attrgetter("kv_tokens")


@dataclass(slots=True)
class Candidate:
    """hit_blocks: leading blocks of the prompt that it caches; 0 for one that has too much work to be chosen for them.
    host_blocks, disk_blocks: of these, those that are there, and not on its device. affinity_tokens: taken off its
    cost. slowness: what a prompt token takes there, by the usual."""

    worker: WorkerView
    slowness: float
    hit_blocks: int
    affinity_tokens: float
    host_blocks: int = 0
    disk_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Search:
    """What candidates are looked for by.

    most_tokens: what a decode worker's KV pool must be able to hold. num_tokens: to compute where nothing is cached.
    runs: who caches the prompt's beginning.
    session: key of the request's session, if it has one. adapter: that workers must have.
    avoided: places that fail (router/policy/breaker.py).
    """

    view: ClusterView
    policy: RoutingPolicy
    now: float
    most_tokens: int
    num_tokens: int
    runs: Sequence[Run]
    session: int | None
    avoided: Set[str]
    rng: random.Random
    adapter: Adapter | None = None

    def decodes(self, *, paired: bool) -> list[Candidate]:
        """Ready workers that are large enough; `paired`: with a prefill worker, as far as any is."""
        warm = self._fitting(self.view.ready_decodes_paired()) if paired else []
        workers = warm or self._fitting(self.view.ready_workers(Role.DECODE))
        return self._candidates(Role.DECODE, workers, _kv_tokens)

    def prefills(self, decodes: Sequence[Candidate]) -> list[Candidate]:
        """Ready workers with a warm path to one of `decodes`."""
        linked = 0
        for decode in decodes:
            linked |= decode.worker.linked
        workers = self._adapted(self.view.ready_workers(Role.PREFILL))
        if self.view.ready_slots(Role.PREFILL) & ~linked:
            workers = [worker for worker in workers if linked >> worker.slot & 1]
        return self._candidates(Role.PREFILL, workers, _prompt_tokens, decodes)

    def _fitting(self, workers: list[WorkerView]) -> list[WorkerView]:
        adapted = self._adapted(workers)
        if self.view.ready_decodes_hold(self.most_tokens):  # as nearly always; else it is asked of each
            return adapted
        return [worker for worker in adapted if worker.most_tokens >= self.most_tokens]

    def _adapted(self, workers: list[WorkerView]) -> list[WorkerView]:
        if self.adapter is None:
            return workers
        return [worker for worker in workers if self.adapter in worker.info.adapters]

    def _candidates(
        self, role: Role, workers: list[WorkerView], work: Work, partners: Sequence[Candidate] = ()
    ) -> list[Candidate]:
        of_role = self.view.paces.of_role(role, self.now)
        if self.avoided:  # but a place that fails is better than none
            workers = [worker for worker in workers if worker.ref.worker_id not in self.avoided] or workers
        heard_s = self.now - self.policy.stale_after_s
        fresh = [worker for worker in workers if worker.heard_at_s >= heard_s]
        if not fresh:  # nothing is known to hold: the better one of two at random
            two = self.rng.sample(workers, min(2, len(workers)))
            return [Candidate(worker, self._slowness(worker, of_role), 0, 0.0) for worker in two]
        own = None
        if self.session is not None:
            own = fresh[own_place(self.session, [worker.place_key for worker in fresh])]
        chosen = fresh if len(fresh) <= 2 * WIDTH else self._narrowed(fresh, work, own, partners)
        most = self.policy.imbalance * (min(map(work, chosen)) + self.num_tokens)
        return [self._candidate(worker, of_role, idle=work(worker) <= most, own=worker is own) for worker in chosen]

    def _candidate(self, worker: WorkerView, of_role: float | None, *, idle: bool, own: bool) -> Candidate:
        return Candidate(
            worker,
            self._slowness(worker, of_role),
            blocks_held(self.runs, worker.slot) if idle else 0,
            self.policy.affinity_tokens if own else 0.0,
            *(blocks_below(self.runs, worker.slot) if idle and self.view.prefixes.tiered else ()),
        )

    def _slowness(self, worker: WorkerView, of_role: float | None) -> float:
        pace, usual = worker.pace.at(self.now, of_role), self.view.paces.usual
        return pace / usual if pace and usual else 1.0

    def _narrowed(
        self, fresh: list[WorkerView], work: Work, own: WorkerView | None, partners: Sequence[Candidate]
    ) -> list[WorkerView]:
        by_work, usable = sorted(fresh, key=work), set(fresh)
        chosen = dict.fromkeys(by_work[:WIDTH])
        chosen |= dict.fromkeys(self._holders(by_work, usable, work))
        chosen |= dict.fromkeys(self._near(partners, usable, work))
        return list(chosen if own is None else {**chosen, own: None})

    def _near(self, partners: Sequence[Candidate], usable: Set[WorkerView], work: Work) -> Iterator[WorkerView]:
        """The least loaded near each of the first few of `partners`."""
        for place in dict.fromkeys(partner.worker.neighbourhood for partner in partners[:WIDTH]):
            near = [worker for worker in self.view.ready_prefills_near(place) if worker in usable] if place else []
            if near:
                yield min(near, key=work)

    def _holders(self, by_work: list[WorkerView], usable: Set[WorkerView], work: Work) -> list[WorkerView]:
        """Those that cache the longest runs; of equals the least loaded."""
        found: dict[WorkerView, None] = {}
        for run in reversed(self.runs[-WIDTH:]):
            if run.holders.bit_count() > FEW:
                holders = list(islice((worker for worker in by_work if run.holders >> worker.slot & 1), WIDTH))
            else:
                holders = [worker for worker in map(self.view.at, _slots(run.holders)) if worker in usable]
                holders.sort(key=work)
            found |= dict.fromkeys(holders)
            if len(found) >= WIDTH:
                break
        return list(found)[:WIDTH]


def _slots(bits: int) -> list[int]:
    found = []
    while bits:
        lowest = bits & -bits
        found.append(lowest.bit_length() - 1)
        bits ^= lowest
    return found
