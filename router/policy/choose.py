"""Which workers serve a request: filter, score, pick, decide. Told what is known and when; no clock.

router/policy/candidates.py filters, router/policy/cost.py scores; the cheapest way is picked, and whether a remote
prefill pays is decided by the same sums. Every choice carries its reason.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence, Set
from dataclasses import dataclass
from enum import StrEnum

from core.membership import WorkerInfo, WorkerRef
from core.request import GenerateRequest, Placement
from router.policy.affinity import session_key
from router.policy.candidates import Candidate, Search
from router.policy.cost import CostModel, Score
from router.policy.routing_policy import RoutingPolicy
from router.prefix_view import Run, longest_on_device
from router.view import ClusterView


class PlanReason(StrEnum):
    """Why the prompt is prefilled where it is; log field and metric label."""

    ASKED = "asked"  # the request said where, or its hand-offs failed (router/flow.py)
    PREFILL_POOL = "prefill_pool"  # a prefill worker does it at less cost
    PREFILL_POOL_BUSY = "prefill_pool_busy"  # the decode worker does: prompts queue, or prefill workers are slow
    PREFIX_ON_DECODE = "prefix_on_decode"  # the decode worker does, as it caches the beginning
    NO_PREFILL_WORKER = "no_prefill_worker"  # none is ready and paired with a decode worker


@dataclass(frozen=True, slots=True)
class Plan:
    """`scores`: the way that was chosen, then the cheapest of the other kind, for logs and traces."""

    reason: PlanReason
    scores: tuple[Score, ...]

    @property
    def decode(self) -> WorkerRef:
        return self.scores[0].decode

    @property
    def prefill(self) -> WorkerRef | None:
        """None: the decode worker prefills."""
        return self.scores[0].prefill

    @property
    def workers(self) -> tuple[WorkerRef, ...]:
        return (self.decode,) if self.prefill is None else (self.decode, self.prefill)

    @property
    def prefiller(self) -> WorkerRef:
        """Who computes the prompt."""
        return self.prefill or self.decode


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that needs workers. keys: of the blocks of its prompt that a hit may cover, in order."""

    request: GenerateRequest
    placement: Placement
    keys: Sequence[int] = ()


def choose(
    ask: Ask,
    view: ClusterView,
    policy: RoutingPolicy,
    local_cost: float,
    now: float,
    rng: random.Random,
    avoided: Set[str] = frozenset(),
) -> Plan | None:
    """The workers for a request, or None when the roles that it needs are not ready.

    local_cost: RoutingPolicy.local_prefill_cost as it is now. avoided: places to use only where there is no other.
    """
    request = ask.request
    runs = view.prefixes.runs(ask.keys)
    search = Search(
        view=view,
        policy=policy,
        now=now,
        most_tokens=request.num_prompt_tokens + request.stop.max_tokens,
        num_tokens=request.num_given_tokens,
        runs=runs,
        session=session_key(request.tenant, request.session_id) if request.session_id else None,
        avoided=avoided,
        rng=rng,
        adapter=request.adapter,
    )
    decodes = search.decodes(paired=ask.placement is not Placement.LOCAL)
    if not decodes:
        return None
    model = _cost_model(ask, view, policy, runs, decodes[0].worker.info, now)
    if ask.placement is Placement.LOCAL:
        return Plan(PlanReason.ASKED, (model.cheapest_local(decodes, 1.0),))
    remote = model.cheapest_remote(decodes, search.prefills(decodes))
    if ask.placement is Placement.REMOTE:
        return None if remote is None else Plan(PlanReason.ASKED, (remote,))
    if remote is None:
        return Plan(PlanReason.NO_PREFILL_WORKER, (model.cheapest_local(decodes, 1.0),))
    return _decide(model, decodes, remote, local_cost)


def _cost_model(
    ask: Ask, view: ClusterView, policy: RoutingPolicy, runs: Sequence[Run], info: WorkerInfo, now: float
) -> CostModel:
    """runs: of cached blocks, the longest last. info: of any worker, as all have the same blocks."""
    longest = longest_on_device(runs, tiered=view.prefixes.tiered)
    return CostModel(
        policy,
        ask.request.num_given_tokens,
        info.block_size,
        block_cost=info.block_bytes / 1e9 / view.paces.usual if view.paces.usual else 0.0,
        longest_blocks=longest.num_blocks,
        holder=(longest.holders & -longest.holders).bit_length() - 1,
        exposed=view.exposed.by_lane(now),
    )


def _decide(model: CostModel, decodes: list[Candidate], remote: Score, cost: float) -> Plan:
    """Where the prompt costs less: a prefill worker that is free goes first, as a prompt computed on a decode worker
    delays the streams there; but a rigid split leaves the decode workers idle while prompts queue."""
    if math.isinf(cost):
        return Plan(PlanReason.PREFILL_POOL, (remote,))
    local = model.cheapest_local(decodes, cost)
    if remote.total <= local.total:
        return Plan(PlanReason.PREFILL_POOL, (remote, local))
    without_hits = local.total + (model.num_tokens - local.computed_tokens) * cost
    reason = PlanReason.PREFILL_POOL_BUSY if remote.total > without_hits else PlanReason.PREFIX_ON_DECODE
    return Plan(reason, (local, remote))
