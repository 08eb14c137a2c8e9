"""Every open request's way through the workers, without clock or socket: told what happened, it says what to do.

router/flow.py has the stages. A worker knows an attempt, not a request: each new plan has an attempt id that was never
used before, by any router, so what an old one still says is ignored, and a caller may use a request id again. Each
output position of each choice is delivered once, in order, whichever worker it comes from; the request ends with the
last of its choices.

A lost worker ends no request. One without a token begins again; one whose tokens are out goes on elsewhere from the
latest of them: seeds are by position, and penalties, stop strings and grammars look at all tokens, so the rest is what
the lost worker would have drawn. A draining worker's requests leave it in the same way (router/drain.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import assert_never

from core.errors import BadRequest, Rejected, RejectReason, TandemError, TransferFailed, WorkerLost
from core.membership import Life, Role, WorkerRef
from core.messages import (
    Answer,
    Draining,
    PeerConnected,
    Refused,
    RefuseReason,
    Reserved,
    ResyncCache,
    Serving,
    StepOutput,
)
from core.request import FAILURES, GenerateRequest, Placement, TokenDelta
from router.admission.admission import Admission, no_adapter
from router.admission.policy import AdmissionPolicy
from router.blame import shares_of_blame
from router.books import Books
from router.config import DispatcherConfig
from router.drain import must_leave
from router.effects import Deliver, Effect, RaceEnded, Send
from router.flow import Flow, Leg, Output, Stage
from router.open_requests import OpenRequests
from router.planner import Planner
from router.view import ClusterView


class Dispatcher:
    """Every open request of one router. `router_id` is of this life of the router alone."""

    def __init__(self, config: DispatcherConfig, view: ClusterView, router_id: str) -> None:
        self.admission = Admission(AdmissionPolicy(), view, config.tokens_ahead)
        self._config = config
        self._view = view
        self._books = Books(view, self.admission.out, router_id)
        self.planner = Planner(config, view, self._books, router_id)
        self._open = OpenRequests(self.admission, self._books, self.planner, config.queue_timeout_s)

    @property
    def num_open(self) -> int:
        return len(self._open.flows)

    @property
    def num_queued(self) -> int:
        return len(self.admission.line) + len({leg.flow for leg in self.planner.stranded})

    def submit(
        self,
        request: GenerateRequest,
        placement: Placement,
        now: float,
        max_ttft_s: float | None = None,
        keys: Sequence[int] = (),
    ) -> list[Effect]:
        """Take a request. max_ttft_s: its caller would rather be refused than wait longer for the first token. keys: as
        in router/policy/choose.py; without them its prompt is nowhere cached.

        Raises: Rejected: as Admission.enter, or as many are open as this router holds, or nobody has its adapter and
            nobody has come or gone for as long as it would wait. BadRequest: the id is in use, or no worker's whole KV
            pool could hold the request.
        """
        if len(self._open.flows) >= self._config.max_open_requests:
            raise Rejected(RejectReason.QUEUE_FULL, f"{len(self._open.flows)} requests are open")
        if request.request_id in self._open.flows:
            raise BadRequest("request_id", f"{request.request_id} is in use by an open request")
        decodes = self._view.workers(Role.DECODE)
        most_tokens = request.num_prompt_tokens + request.stop.max_tokens
        if decodes and all(worker.most_tokens < most_tokens for worker in decodes):
            raise BadRequest("max_tokens", f"prompt and output, {most_tokens} tokens, fit into no worker's KV pool")
        adapter = request.adapter
        if adapter is not None and self._view.nobody_has(adapter, now - self._config.queue_timeout_s):
            raise no_adapter(adapter)
        shed = self.admission.enter(request, now, max_ttft_s)
        outputs = [Output() for _ in range(request.num_choices)]
        flow = Flow(request, placement, keys, now, now + self._config.request_timeout_s, outputs)
        max_wait_s = self.admission.max_wait_s(request)
        flow.legs.append(Leg(flow, request, tuple(range(request.num_choices)), now + max_wait_s))
        self._open.flows[request.request_id] = flow
        effects = [] if shed is None else self._open.fail(self._open.flows[shed.request_id], shed.error)
        return [*effects, *self._admit(now)]

    def cancel(self, request_id: str, now: float) -> list[Effect]:
        """The client left, or has what it wanted. Unknown ids are ignored."""
        flow = self._open.flows.get(request_id)
        return [] if flow is None else [*self._open.end(flow), *self._admit(now)]

    def answered(self, worker: WorkerRef, answer: Answer, now: float) -> list[Effect]:
        """What a worker said."""
        return [*self._heard(worker, answer, now), *self._admit(now)]

    def _heard(self, worker: WorkerRef, answer: Answer, now: float) -> list[Effect]:
        match answer:
            case StepOutput(deltas, load, others, cache, turns, computing, in_line):
                self._view.heard(worker, load, others, now)
                self._view.computes(worker, computing)
                self._books.in_line(in_line)
                self.admission.served_elsewhere(turns)
                missed = self._view.heard_cache(worker, cache, now)
                effects: list[Effect] = [Send(worker, ResyncCache())] if missed else []
                return effects + [effect for delta in deltas for effect in self._tokens(worker, delta, now)]
            case Reserved():
                return self.planner.reserved(answer, now)
            case Refused():
                return self._refused(worker, answer, now)
            case PeerConnected():
                self._view.connected(worker, answer)
                return self.serve_queue(now)
            case Draining(finish_s, unbegun):
                self._view.draining(worker, now + finish_s)
                self.admission.workers_changed()
                return self._leave_draining(now, frozenset(unbegun))
            case Serving(role):
                self._view.serving(worker, role)
                return self.serve_queue(now)
            case _:
                assert_never(answer)

    def worker_lost(self, worker: WorkerRef, now: float) -> list[Effect]:
        """A worker is gone: what it held goes on elsewhere."""
        known = self._view.get(worker)
        if known is None:
            return []
        if known.life is not Life.DRAINING:
            self.planner.breakers.failed(worker.worker_id, now)
        self._view.lose(worker, now)
        error = WorkerLost(worker.worker_id, "it died or its stream broke")
        effects: list[Effect] = []
        shares = shares_of_blame(worker, self._open.legs(), known.computing, self._config.tokens_ahead)
        for flow in list(self._open.flows.values()):
            lost = [leg for leg in flow.legs if leg.stage is not Stage.QUEUED and leg.uses(worker)]
            suspected = [leg for leg in lost if leg in shares]
            if suspected:
                has_talked = any(leg.has_new_tokens for leg in suspected)
                flow.blame(has_talked, max(shares[leg] for leg in suspected))
            else:
                flow.pardon()
            effects += self._go_on(flow, lost, error, now)
        self.admission.workers_changed()
        return [*effects, *self._admit(now)]

    def serve_queue(self, now: float) -> list[Effect]:
        """Plan those who wait, as far as workers are ready: first those who had their turn."""
        self.admission.workers_changed()
        return [*(effect for leg in self.planner.stranded for effect in self.planner.plan(leg, now)), *self._admit(now)]

    def tick(self, now: float) -> list[Effect]:
        """Leave draining workers whose time has come; end what has waited too long."""
        effects = self._leave_draining(now)
        for flow in list(self._open.flows.values()):
            if any(leg.stage is Stage.QUEUED and now >= leg.queue_deadline_s for leg in flow.legs):
                error = self.admission.waited_too_long(flow.request, now - flow.arrived_s)
                effects += self._open.fail(flow, error)
            elif now >= flow.deadline_s:
                message = f"not done within {self._config.request_timeout_s} s"
                effects += self._open.fail(flow, Rejected(RejectReason.TIMEOUT, message))
        effects += self._admit(now)
        if not self.admission.line:  # room that nobody waits for
            effects += self.planner.hedge(self._open.legs(), now)
        return effects

    def _admit(self, now: float) -> list[Effect]:
        """Give as many their turn as the workers have room for."""
        effects: list[Effect] = []
        while (request_id := self.admission.next(now)) is not None:
            (leg,) = self._open.flows[request_id].legs
            effects += self.planner.plan(leg, now)
        return effects

    def _leave_draining(self, now: float, unbegun: frozenset[str] = frozenset()) -> list[Effect]:
        """Move what must leave, as far as there is another worker for it."""
        effects: list[Effect] = []
        for leg in must_leave(self._open.legs(), self._view, now, unbegun):
            if self.planner.choose(leg, now) is not None:
                effects += self._open.move(leg, now)
        return effects

    def _refused(self, worker: WorkerRef, answer: Refused, now: float) -> list[Effect]:
        leg = self._books.attempts.get(answer.request_id)
        if leg is None:
            return []
        match answer.reason:
            case RefuseReason.BAD_REQUEST:
                return self._open.fail(leg.flow, BadRequest("prompt", answer.message))
            case RefuseReason.NO_BLOCKS if leg.rival is not None:
                return self._open.drop(leg)
            case RefuseReason.NO_BLOCKS if self._may_go_on_waiting(leg.flow, now):
                return self._open.move(leg, now)
            case RefuseReason.NO_BLOCKS:
                return self._open.fail(leg.flow, Rejected(RejectReason.QUEUE_TIMEOUT, answer.message))
            case RefuseReason.TRANSFER_FAILED:
                leg.flow.num_failed_handoffs += 1
                # One end does not know which one failed.
                for ref in (worker,) if leg.plan is None else leg.plan.workers:
                    self.planner.breakers.failed(ref.worker_id, now)
                return self._failed(leg, TransferFailed(f"{worker}: {answer.message}"), now)
            case RefuseReason.DRAINING:
                self._view.draining(worker)
                self.admission.workers_changed()
                return self._open.move(leg, now)
            case RefuseReason.WRONG_ROLE:
                return self._failed(leg, WorkerLost(worker.worker_id, "it has changed its role"), now)
            case _:
                assert_never(answer.reason)

    def _may_go_on_waiting(self, flow: Flow, now: float) -> bool:
        """For room in a KV pool: a stream as long as it lives, as one that is preempted does; else as long as for its
        turn. A drain or a death may have brought it where others were first."""
        streams = any(output.tokens for output in flow.outputs)
        return streams or now - flow.arrived_s < self.admission.max_wait_s(flow.request)

    def _tokens(self, worker: WorkerRef, delta: TokenDelta, now: float) -> list[Effect]:
        leg = self._books.attempts.get(delta.request_id)
        if leg is None or leg.plan is None:
            return []
        effects: list[Effect] = []
        if leg.rival is not None:
            if delta.finish_reason in FAILURES:
                return self._open.drop(leg)
            effects = self._outrun(leg.rival, leg, now)
        if worker == leg.plan.prefill and leg.stage is Stage.PREFILLING:
            leg.move(Stage.DECODING)
        if leg.prefill_open and leg.stage is Stage.DECODING and worker == (leg.plan.prefill or worker):
            computed_tokens = delta.usage.computed_tokens if delta.usage else leg.request.num_given_tokens
            self._books.first_token(leg, worker, computed_tokens, now)
            self.admission.first_token(leg.flow.request, now)
        elif leg.watch is not None and worker == leg.plan.decode:
            self._books.decoded(leg, delta, now)
        if delta.usage is not None:
            self.planner.breakers.succeeded(worker.worker_id)
        return effects + self._deliver(leg, worker, delta)

    def _outrun(self, leg: Leg, rival: Leg, now: float) -> list[Effect]:
        """Its rival has a token."""
        self._books.outrun(leg, now)
        won = RaceEnded(leg.flow.request.request_id, won=rival.begun_s > leg.begun_s)
        return [won, *self._open.drop(leg)]

    def _deliver(self, leg: Leg, worker: WorkerRef, delta: TokenDelta) -> list[Effect]:
        """What is next of its choice's output. The last of all choices ends the request, and so does a failure."""
        flow, choice = leg.flow, leg.choices[delta.choice]
        ready = flow.outputs[choice].take(delta)
        if not ready:
            return []
        request_id = flow.request.request_id
        broken = ready[-1].finish_reason in FAILURES
        over = broken or all(output.ended for output in flow.outputs)
        effects: list[Effect] = [
            Deliver(request_id, _of_choice(item, choice), last=over and item is ready[-1]) for item in ready
        ]
        if broken:
            return effects + self._open.end(flow)
        if all(output.ended for output in leg.outputs):
            # A decode worker that has not drawn the last token does not know yet that nothing is left to do.
            if leg.plan is not None and worker == leg.plan.prefill:
                effects += self.planner.recall(leg)
            self._open.close(leg)
        return effects

    def _failed(self, leg: Leg, error: TandemError, now: float) -> list[Effect]:
        """This attempt will not go on."""
        leg.flow.blame(leg.has_new_tokens)
        return self._go_on(leg.flow, [leg], error, now)

    def _go_on(self, flow: Flow, lost: list[Leg], error: TandemError, now: float) -> list[Effect]:
        """Begin again, or from the tokens that are out; the error when that was tried too often."""
        if (
            flow.num_silent_failures >= self._config.max_silent_failures
            or flow.num_failures > self._config.max_failures
        ):
            return self._open.fail(flow, error)
        return [effect for leg in lost for effect in self._open.move(leg, now)]


def _of_choice(delta: TokenDelta, choice: int) -> TokenDelta:
    """A leg that goes on for a choice knows no other. Most deltas stay as they are: a copy costs more than all the rest
    that is done with one here."""
    return delta if delta.choice == choice else replace(delta, choice=choice)
