"""Starts attempts: chooses workers for a leg, says to them what to do, and calls it back. Without clock or socket.

A leg that no ready workers fit is kept until `plan` finds some.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Set

from core.messages import CancelRequest, ReserveBlocks, Reserved, StartGeneration, StartPrefill
from core.request import Placement
from router.books import Books
from router.config import DispatcherConfig
from router.effects import Effect, Planned, Send
from router.flow import Leg, Stage
from router.hedging import HedgeBudget, is_late
from router.policy.breaker import Breakers
from router.policy.choose import Ask, Plan, choose
from router.policy.routing_policy import RoutingPolicy
from router.view import ClusterView


class Planner:
    """Of one router. `routing` may be replaced at any moment; what is planned stays."""

    def __init__(self, config: DispatcherConfig, view: ClusterView, books: Books, router_id: str) -> None:
        self.routing = RoutingPolicy()
        self.breakers = Breakers()
        self._config = config
        self._view = view
        self._books = books
        self._rng = random.Random(router_id)
        self._hedges = HedgeBudget()
        self._stranded: dict[Leg, None] = {}  # had their turn, and no workers fit

    @property
    def stranded(self) -> list[Leg]:
        """In the order in which they stranded."""
        return list(self._stranded)

    def forget(self, leg: Leg) -> None:
        """It needs no workers any more."""
        self._stranded.pop(leg, None)

    def choose(self, leg: Leg, now: float) -> Plan | None:
        return self._choose(leg, leg.flow.next_placement, self.breakers.avoided(now), now)

    def _choose(self, leg: Leg, placement: Placement, avoided: Set[str], now: float) -> Plan | None:
        ask = Ask(leg.request, placement, leg.flow.keys)
        local_cost = self.routing.local_prefill_cost or self._config.local_prefill_cost
        return choose(ask, self._view, self.routing, local_cost, now, self._rng, avoided)

    def plan(self, leg: Leg, now: float) -> list[Effect]:
        """Give a queued leg workers, when any fit."""
        plan = self.choose(leg, now)
        if plan is None:
            self._stranded[leg] = None
            return []
        self.forget(leg)
        for output in leg.outputs:
            output.early.clear()
        if not leg.flow.num_plans:
            self._hedges.came(self.routing.hedge)
        return self._begin(leg, plan, now)

    def hedge(self, legs: Iterable[Leg], now: float) -> list[Effect]:
        """Begin a second attempt for each leg that is late, as far as the budget and other workers go."""
        policy, effects = self.routing.hedge, list[Effect]()
        if policy is None:
            return effects
        for leg in legs:
            if self._hedges.allows_one and is_late(leg, policy, self._view.paces.usual, now):
                effects += self._hedge(leg, now)
        return effects

    def _hedge(self, leg: Leg, now: float) -> list[Effect]:
        plan = self._other_way(leg, now)
        if plan is None:
            return []
        self._hedges.begun()
        rival = Leg(leg.flow, leg.request, leg.choices, leg.queue_deadline_s, rival=leg)
        leg.rival = rival
        leg.flow.legs.append(rival)
        return self._begin(rival, plan, now)

    def _other_way(self, leg: Leg, now: float) -> Plan | None:
        """By workers that neither fail nor have the leg already."""
        busy = () if leg.plan is None else leg.plan.workers
        avoided = self.breakers.avoided(now) | {ref.worker_id for ref in busy}
        placements = dict.fromkeys([leg.flow.next_placement])
        if leg.flow.placement is Placement.AUTO:
            placements[Placement.LOCAL] = None
        for placement in placements:
            plan = self._choose(leg, placement, avoided, now)
            if plan is not None and not any(ref.worker_id in avoided for ref in plan.workers):
                return plan
        return None

    def _begin(self, leg: Leg, plan: Plan, now: float) -> list[Effect]:
        flow = leg.flow
        for ref in plan.workers:
            self.breakers.chosen(ref.worker_id, now)
        flow.num_plans += 1
        self._books.begin(leg, plan, now)
        attempt_id = leg.request.request_id
        planned = Planned(
            flow.request.request_id, flow.num_plans, attempt_id, plan, now - flow.arrived_s, hedge=leg.rival is not None
        )
        if plan.prefill is None:
            leg.move(Stage.DECODING)
            return [planned, Send(plan.decode, StartGeneration(leg.request))]
        leg.move(Stage.RESERVING)
        return [planned, Send(plan.decode, ReserveBlocks(leg.request, attempt_id, plan.prefill))]

    def reserved(self, answer: Reserved, now: float) -> list[Effect]:
        """The decode worker has blocks: the prefill worker may begin."""
        leg = self._books.attempts.get(answer.request_id)
        if leg is None or leg.stage is not Stage.RESERVING or leg.plan is None or leg.plan.prefill is None:
            return []
        leg.move(Stage.PREFILLING)
        self._books.place(leg, now)
        return [Send(leg.plan.prefill, StartPrefill(leg.request, answer.ticket))]

    def recall(self, leg: Leg) -> list[Effect]:
        """Tell every living worker of the current attempt to free what it holds."""
        if leg.plan is None or leg.stage is Stage.QUEUED:
            return []
        workers = [leg.plan.decode]
        if leg.plan.prefill is not None and leg.prefill_open:
            workers.append(leg.plan.prefill)
        return [Send(ref, CancelRequest(leg.request.request_id)) for ref in workers if self._view.get(ref) is not None]
