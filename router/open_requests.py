"""The open requests of one router, and what becomes of their legs: moved to other workers, dropped, closed, ended.

Whatever ends a leg tells its workers and takes it off every book. With its last leg a request is over.
"""

from __future__ import annotations

from core.errors import TandemError
from router.admission.admission import Admission
from router.books import Books
from router.effects import Effect, Fail
from router.flow import Flow, Leg, Stage
from router.planner import Planner


class OpenRequests:
    """`flows`: by request id, in order of arrival. queue_timeout_s: as in DispatcherConfig."""

    def __init__(self, admission: Admission, books: Books, planner: Planner, queue_timeout_s: float) -> None:
        self.flows: dict[str, Flow] = {}
        self._admission = admission
        self._books = books
        self._planner = planner
        self._queue_timeout_s = queue_timeout_s

    def legs(self) -> list[Leg]:
        """In order of their requests' arrival."""
        return [leg for flow in self.flows.values() for leg in flow.legs]

    def drop(self, leg: Leg) -> list[Effect]:
        """Its rival goes on alone."""
        effects = self._planner.recall(leg)
        self.close(leg)
        return effects

    def move(self, leg: Leg, now: float) -> list[Effect]:
        """To other workers, or into the queue; nowhere while its rival goes on."""
        if leg.rival is not None:
            return self.drop(leg)
        flow, queue_deadline_s = leg.flow, now + self._queue_timeout_s
        effects = self._planner.recall(leg)
        self._books.end(leg)
        if not leg.has_new_tokens:
            leg.move(Stage.QUEUED)
            leg.queue_deadline_s = queue_deadline_s
            return effects + self._planner.plan(leg, now)
        continued = leg.continued(queue_deadline_s)
        leg.move(Stage.DONE)
        flow.legs.remove(leg)
        flow.legs += continued
        return effects + [effect for item in continued for effect in self._planner.plan(item, now)]

    def fail(self, flow: Flow, error: TandemError) -> list[Effect]:
        return [*self.end(flow), Fail(flow.request.request_id, error)]

    def end(self, flow: Flow) -> list[Effect]:
        """Nothing more is wanted of it."""
        effects = [effect for leg in flow.legs for effect in self._planner.recall(leg)]
        for leg in list(flow.legs):
            self.close(leg)
        return effects

    def close(self, leg: Leg) -> None:
        """It is over; with its last leg a request is."""
        if leg.stage is not Stage.QUEUED:
            self._books.end(leg)
        self._planner.forget(leg)
        if leg.rival is not None:
            leg.rival.rival = None
            leg.rival = None
        leg.move(Stage.DONE)
        leg.flow.legs.remove(leg)
        if not leg.flow.legs:
            self._forget(leg.flow)

    def _forget(self, flow: Flow) -> None:
        request = flow.request
        del self.flows[request.request_id]
        self._admission.leave(request.request_id)
        for output in flow.outputs:
            if output.ended:
                self._admission.expected.learn(request.tenant, len(output.tokens))
