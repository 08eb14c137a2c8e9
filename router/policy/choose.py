"""Which workers serve a request: filter, score, pick, decide. Small functions of (request, view); no clock.

A filter narrows candidates, a scorer gives each a value in [0, 1], the picker takes the best, the decider says
whether a remote prefill pays. Every choice carries its reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from core.membership import Life, Role, WorkerRef
from core.request import GenerateRequest, Placement
from router.policy.decide import remote_pays
from router.view import ClusterView, WorkerView


class PlanReason(StrEnum):
    """Why the prompt is prefilled where it is; log field and metric label."""

    ASKED = "asked"  # the request said where
    PREFILL_POOL = "prefill_pool"  # a prefill worker does it sooner, or nearly so
    PREFILL_POOL_BUSY = "prefill_pool_busy"  # the decode worker does it much sooner
    NO_PREFILL_WORKER = "no_prefill_worker"  # none is ready and paired with a decode worker


@dataclass(frozen=True, slots=True)
class Plan:
    """`prefill` None: the decode worker prefills. `scores`: of every candidate looked at, for `explain`."""

    decode: WorkerRef
    prefill: WorkerRef | None
    reason: PlanReason
    scores: tuple[tuple[WorkerRef, float], ...]

    @property
    def prefiller(self) -> WorkerRef:
        """Who computes the prompt."""
        return self.prefill or self.decode


def choose(request: GenerateRequest, placement: Placement, view: ClusterView, local_prefill_cost: float) -> Plan | None:
    """The workers for a request, or None when the roles that it needs are not ready.

    local_prefill_cost: see remote_pays.
    """
    decodes = filter_fitting(filter_ready(view.workers(Role.DECODE)), request)
    if not decodes:
        return None
    if placement is Placement.LOCAL:
        return _local(decodes, PlanReason.ASKED)
    prefills = filter_ready(view.workers(Role.PREFILL))
    warm = [worker for worker in decodes if filter_paired(prefills, worker.ref, view)]
    if warm:
        decode_scores = score_all(warm)
        decode = pick(decode_scores)
        prefill_scores = score_all(filter_paired(prefills, decode, view))
        prefill = pick(prefill_scores)
        scores = (*decode_scores, *prefill_scores)
        if placement is Placement.REMOTE:
            return Plan(decode, prefill, PlanReason.ASKED, scores)
        queues = view.prefills(prefill), view.prefills(decode)
        if remote_pays(request.num_given_tokens, *queues, local_prefill_cost):
            return Plan(decode, prefill, PlanReason.PREFILL_POOL, scores)
        return Plan(decode, None, PlanReason.PREFILL_POOL_BUSY, scores)
    return None if placement is Placement.REMOTE else _local(decodes, PlanReason.NO_PREFILL_WORKER)


def _local(decodes: list[WorkerView], reason: PlanReason) -> Plan:
    scores = score_all(decodes)
    return Plan(pick(scores), None, reason, tuple(scores))


def filter_ready(workers: list[WorkerView]) -> list[WorkerView]:
    return [worker for worker in workers if worker.life is Life.READY]


def filter_fitting(workers: list[WorkerView], request: GenerateRequest) -> list[WorkerView]:
    """Those whose whole KV pool could hold the request."""
    most_tokens = request.num_prompt_tokens + request.stop.max_tokens
    return [
        worker
        for worker in workers
        if min(most_tokens, worker.info.max_context_tokens) <= worker.info.num_blocks * worker.info.block_size
    ]


def filter_paired(workers: list[WorkerView], decode: WorkerRef, view: ClusterView) -> list[WorkerView]:
    """Those with a warm KV path to and from the decode worker."""
    return [worker for worker in workers if view.paired(worker.ref, decode)]


def score_all(workers: list[WorkerView]) -> list[tuple[WorkerRef, float]]:
    return [(worker.ref, score_idle(worker)) for worker in workers]


def score_idle(worker: WorkerView) -> float:
    """1 for a worker with nothing to do, towards 0 as the tokens of its open requests grow past its KV pool."""
    capacity_tokens = worker.info.num_blocks * worker.info.block_size
    return capacity_tokens / (capacity_tokens + worker.given_tokens)


def pick(scores: list[tuple[WorkerRef, float]]) -> WorkerRef:
    """The best score; the first registered among equals."""
    return max(scores, key=lambda item: item[1])[0]
