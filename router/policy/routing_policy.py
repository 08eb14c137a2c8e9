"""What an operator says of routing: the section `routing` of the policy file."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

from router.strict import Strict

Share = Annotated[float, Field(ge=0, le=1)]
Weight = Annotated[float, Field(ge=0, le=1000)]
MOST: Final = 1e9  # bounded, so that no sum of costs overflows: infinities that meet make a choice by accident


class HedgePolicy(Strict):
    """A second attempt, on other workers, for a request whose first token does not come (router/hedging.py).

    after_s: since its workers were chosen. times_predicted: nor before so many times what these were expected to take.
    max_share: most hedges, as a share of requests. What these cost and bring: docs/adr/0026-hedged-first-tokens.md.
    """

    after_s: Annotated[float, Field(gt=0, le=3600)] = 2.0
    times_predicted: Annotated[float, Field(ge=1, le=1000)] = 4.0
    max_share: Annotated[float, Field(gt=0, le=1)] = 0.05


class RoutingPolicy(Strict):
    """Costs are in tokens: 1 is a prompt token computed by a worker of usual pace.

    local_prefill_cost: what a prompt token computed on a decode worker costs, as it delays the streams there; None: as
    the router was started. overlap_weight: what a prompt token in a worker's device cache saves; host_overlap_weight,
    disk_overlap_weight: one in its host memory, or on its disk. kv_token_cost: what each token of a decode worker's
    open requests costs the next one. transfer_weight: what it costs to wait for a
    token's time for KV to move; how much of a transfer is hidden behind computing is learnt. imbalance: a worker that
    has more than so many times the work of the least loaded one, this prompt included, is not chosen for what it
    caches. affinity_tokens: what it is worth to serve a session where it was served before. stale_after_s: a worker
    that last reported longer ago is used only when all did. hedge: None: no request has two attempts at a time.
    """

    local_prefill_cost: Annotated[float, Field(ge=1, le=MOST)] | None = None
    overlap_weight: Share = 1.0
    host_overlap_weight: Share = 0.75
    disk_overlap_weight: Share = 0.25
    kv_token_cost: Weight = 0.2
    transfer_weight: Weight = 1.0
    imbalance: Annotated[float, Field(ge=1, le=MOST)] = 4.0
    affinity_tokens: Annotated[float, Field(ge=0, le=MOST)] = 64.0
    stale_after_s: Annotated[float, Field(gt=0, le=60)] = 3.0
    hedge: HedgePolicy | None = None
