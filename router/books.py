"""What is out at the workers: every attempt by its id, and what each takes up.

An attempt counts in three places: the load of its workers (router/view.py), the prompts under way
(router/admission/room.py), and here. All three are written together, and taken back by the same figures.
1. `begin`: its workers have it; its prompt is under way and has no KV blocks yet.
2. `place`: its decode worker has reserved them; a prefill worker computes.
3. `first_token`: its prompt is computed, so only the decode worker has it.
4. `end`: nobody has it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

from core.membership import WorkerRef
from core.request import TokenDelta
from router.admission.room import PromptsOut
from router.flow import Leg, Stage
from router.policy.choose import Plan
from router.policy.transfer import HandoffWatch
from router.view import ClusterView


class Books:
    """Of one router; no other one, nor another life of it, has its `router_id`."""

    def __init__(self, view: ClusterView, out: PromptsOut, router_id: str) -> None:
        self.attempts: dict[str, Leg] = {}
        self._view = view
        self._out = out
        self._router_id = router_id
        self._serials = itertools.count(1)

    def begin(self, leg: Leg, plan: Plan, now: float) -> None:
        """The leg's next attempt, under an id that was never used before."""
        attempt_id = f"{leg.flow.request.request_id}#{self._router_id}.{next(self._serials)}"
        leg.request = replace(leg.request, request_id=attempt_id)
        leg.plan, leg.begun_s, leg.prefill_begun_s = plan, now, now
        leg.prefill_open, leg.placed, leg.in_line, leg.watch = True, False, False, None
        self.attempts[attempt_id] = leg
        for ref in plan.workers:
            self._view.assign(ref, leg.request.num_given_tokens)
        self._view.begin_prefill(plan.prefiller, leg.computed_tokens)
        self._out.begin(leg.computed_tokens, leg.request.num_given_tokens)

    def in_line(self, attempt_ids: Iterable[str]) -> None:
        """They wait at their workers, from now on until a step computes them."""
        for attempt_id in attempt_ids:
            if (leg := self.attempts.get(attempt_id)) is not None:
                leg.in_line = True

    def place(self, leg: Leg, now: float) -> None:
        leg.placed, leg.prefill_begun_s = True, now
        self._out.place(leg.request.num_given_tokens)

    def first_token(self, leg: Leg, worker: WorkerRef, computed_tokens: int, now: float) -> None:
        self._view.learn_pace(worker, leg.prefill_begun_s, now, computed_tokens)
        self._end_prefill(leg)
        if leg.plan is not None and leg.plan.prefill is not None and len(leg.choices) == 1:
            leg.watch = HandoffWatch(now)

    def decoded(self, leg: Leg, delta: TokenDelta, now: float) -> None:
        """The decode worker of a watched hand-off has drawn a token."""
        watch, plan = leg.watch, leg.plan
        if watch is None or plan is None or plan.prefill is None:
            return
        if watch.kv_bytes:
            self._view.learn_transfer(plan.decode, plan.prefill, watch.kv_bytes, watch.exposed_s(now), now)
            leg.watch = None
        elif delta.usage is not None and delta.usage.kv_bytes_received:
            watch.landed(delta.usage.kv_bytes_received, now)
        else:
            leg.watch = None  # nothing had to move, or its first token overtook the prefill worker's

    def outrun(self, leg: Leg, now: float) -> None:
        """Another attempt was faster."""
        if leg.plan is not None and leg.prefill_open and leg.stage is not Stage.RESERVING:
            self._view.learn_outrun(leg.plan.prefiller, leg.prefill_begun_s, now, leg.computed_tokens)

    def end(self, leg: Leg) -> None:
        del self.attempts[leg.request.request_id]
        if leg.prefill_open:
            self._end_prefill(leg)
        if leg.plan is not None:
            self._view.unassign(leg.plan.decode, leg.request.num_given_tokens)

    def _end_prefill(self, leg: Leg) -> None:
        if leg.plan is None:
            return
        leg.prefill_open = False
        self._view.end_prefill(leg.plan.prefiller, leg.computed_tokens)
        self._out.end(leg.computed_tokens, leg.request.num_given_tokens, placed=leg.placed)
        if leg.plan.prefill is not None:
            self._view.unassign(leg.plan.prefill, leg.request.num_given_tokens)
