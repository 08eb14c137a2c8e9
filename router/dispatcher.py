"""One request's way through the workers, without clock or socket: told what happened, it says what to do.

1. QUEUED: no fitting workers are ready; first come, first served, for a bounded time.
2. RESERVING: the decode worker was asked for blocks. 3. PREFILLING: the prefill worker has the ticket.
4. DECODING: the first token is out (or the decode worker does both), the rest streams.
5. DONE: finished, failed or cancelled; every worker that held something was told.

A worker knows an attempt, not a request: each new plan has an attempt id that was never used before, by any router,
so what an old one still says is ignored, and a caller may use a request id again. Each output position of each choice
is delivered once, in order, whichever worker it comes from; the request ends with the last of its choices.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final, assert_never

from core.errors import BadRequest, InvariantBroken, Rejected, RejectReason, TandemError, TransferFailed, WorkerLost
from core.membership import Role, WorkerRef
from core.messages import (
    Answer,
    CancelRequest,
    Command,
    PeerConnected,
    Refused,
    RefuseReason,
    ReserveBlocks,
    Reserved,
    StartGeneration,
    StartPrefill,
    StepOutput,
)
from core.request import FinishReason, GenerateRequest, Placement, TokenDelta
from router.policy.choose import Choice, choose, filter_fitting
from router.view import ClusterView

FAILURES: Final = frozenset({FinishReason.ABORT, FinishReason.ERROR, FinishReason.DEAD_END})


class Stage(StrEnum):
    QUEUED = "queued"
    RESERVING = "reserving"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    DONE = "done"


NEXT_STAGES: Final[dict[Stage, frozenset[Stage]]] = {
    Stage.QUEUED: frozenset({Stage.RESERVING, Stage.DECODING, Stage.DONE}),
    Stage.RESERVING: frozenset({Stage.PREFILLING, Stage.QUEUED, Stage.DONE}),
    Stage.PREFILLING: frozenset({Stage.DECODING, Stage.QUEUED, Stage.DONE}),
    Stage.DECODING: frozenset({Stage.QUEUED, Stage.DONE}),
    Stage.DONE: frozenset(),
}


@dataclass(frozen=True, slots=True)
class DispatcherConfig:
    """max_open_requests: most requests in any stage. queue_timeout_s: longest wait for ready workers.
    max_attempts: plans a request may have before its first token. request_timeout_s: longest life of a request.
    local_prefill_cost: a prompt is computed on its decode worker when that gives its first token so many times sooner
    than the prefill workers would; inf: never while there are any."""

    max_open_requests: int = 1024
    queue_timeout_s: float = 30.0
    max_attempts: int = 3
    request_timeout_s: float = 1800.0
    local_prefill_cost: float = 2.0

    def __post_init__(self) -> None:
        if not self.local_prefill_cost >= 1.0:
            raise BadRequest("local_prefill_cost", f"must be a number of at least 1, got {self.local_prefill_cost}")


@dataclass(frozen=True, slots=True)
class Send:
    worker: WorkerRef
    command: Command


@dataclass(frozen=True, slots=True)
class Deliver:
    """The next positions of one choice's output. The last one of each choice has a finish reason, the last one of all
    ends the request."""

    request_id: str
    delta: TokenDelta
    last: bool = False


@dataclass(frozen=True, slots=True)
class Fail:
    """The request ends with this error."""

    request_id: str
    error: TandemError


@dataclass(frozen=True, slots=True)
class Planned:
    """Workers were chosen: for logs, metrics and `explain`. waited_s: since the request came."""

    request_id: str
    attempt: int
    attempt_id: str
    choice: Choice
    waited_s: float


Effect = Send | Deliver | Fail | Planned


@dataclass(slots=True)
class _Output:
    """One choice: how far it is out, and decode's tokens that overtook the first one."""

    next_position: int = 0
    early: dict[int, TokenDelta] = field(default_factory=dict)
    ended: bool = False

    def take(self, delta: TokenDelta) -> list[TokenDelta]:
        """The deltas that are next, now that `delta` is here; nothing after the end, and no position twice."""
        self.early.setdefault(delta.position, delta)
        ready = []
        while not self.ended and (item := self.early.pop(self.next_position, None)) is not None:
            self.next_position += len(item.token_ids)
            self.ended = item.finish_reason is not None
            ready.append(item)
        return ready


@dataclass(slots=True, eq=False)
class _Flow:
    request: GenerateRequest
    placement: Placement
    arrived_s: float
    deadline_s: float
    queue_deadline_s: float
    stage: Stage = Stage.QUEUED
    attempt: int = 0
    attempt_id: str = ""
    choice: Choice | None = None
    prefill_open: bool = False  # the prompt's first token has not come from the worker that computes it
    prefill_begun_s: float = 0.0
    outputs: list[_Output] = field(default_factory=list)  # of the current attempt, by choice

    def move(self, to: Stage) -> None:
        if to not in NEXT_STAGES[self.stage]:
            raise InvariantBroken(f"request {self.request.request_id}: {self.stage} -> {to} is not in the table")
        self.stage = to


class Dispatcher:
    """Every open request of one router. `router_id` is of this life of the router alone."""

    def __init__(self, config: DispatcherConfig, view: ClusterView, router_id: str) -> None:
        self._config = config
        self._view = view
        self._router_id = router_id
        self._serials = itertools.count(1)
        self._flows: dict[str, _Flow] = {}  # by request id, in order of arrival
        self._attempts: dict[str, _Flow] = {}  # by attempt id

    @property
    def num_open(self) -> int:
        return len(self._flows)

    @property
    def num_queued(self) -> int:
        return sum(1 for flow in self._flows.values() if flow.stage is Stage.QUEUED)

    def submit(self, request: GenerateRequest, placement: Placement, now: float) -> list[Effect]:
        """Take a request.

        Raises: Rejected: as many are open as this router holds. BadRequest: the id is in use, or no worker's whole KV
            pool could hold the request.
        """
        if len(self._flows) >= self._config.max_open_requests:
            raise Rejected(RejectReason.QUEUE_FULL, f"{len(self._flows)} requests are open")
        if request.request_id in self._flows:
            raise BadRequest("request_id", f"{request.request_id} is in use by an open request")
        decodes = self._view.workers(Role.DECODE)
        if decodes and not filter_fitting(decodes, request):
            most_tokens = request.num_prompt_tokens + request.stop.max_tokens
            raise BadRequest("max_tokens", f"prompt and output, {most_tokens} tokens, fit into no worker's KV pool")
        deadline_s, queue_deadline_s = now + self._config.request_timeout_s, now + self._config.queue_timeout_s
        flow = _Flow(request, placement, now, deadline_s, queue_deadline_s)
        self._flows[request.request_id] = flow
        return self._plan(flow, now)

    def cancel(self, request_id: str) -> list[Effect]:
        """The client left, or has what it wanted. Unknown ids are ignored."""
        flow = self._flows.get(request_id)
        if flow is None:
            return []
        effects = self._recall(flow)
        self._end(flow)
        return effects

    def answered(self, worker: WorkerRef, answer: Answer, now: float) -> list[Effect]:
        """What a worker said."""
        match answer:
            case StepOutput(deltas, load):
                view = self._view.get(worker)
                if view is not None:
                    view.load = load
                return [effect for delta in deltas for effect in self._tokens(worker, delta, now)]
            case Reserved():
                return self._reserved(answer, now)
            case Refused():
                return self._refused(worker, answer, now)
            case PeerConnected():
                self._view.connected(worker, answer)
                return self.serve_queue(now)
            case _:
                assert_never(answer)

    def worker_lost(self, worker: WorkerRef, now: float) -> list[Effect]:
        """A worker is gone: plan again what it held, or fail what has tokens out."""
        if not self._view.lose(worker):
            return []
        effects: list[Effect] = []
        for flow in list(self._flows.values()):
            if flow.choice is None or flow.stage is Stage.QUEUED:
                continue
            on_prefill = flow.choice.prefill == worker and flow.prefill_open
            if flow.choice.decode == worker or on_prefill:
                effects += self._plan_again(flow, WorkerLost(worker.worker_id, "it died or its stream broke"), now)
        return effects

    def serve_queue(self, now: float) -> list[Effect]:
        """Plan those who wait, in order, as far as workers are ready."""
        queued = [flow for flow in self._flows.values() if flow.stage is Stage.QUEUED]
        return [effect for flow in queued for effect in self._plan(flow, now)]

    def tick(self, now: float) -> list[Effect]:
        """End what has waited too long."""
        effects: list[Effect] = []
        for flow in list(self._flows.values()):
            if flow.stage is Stage.QUEUED and now >= flow.queue_deadline_s:
                message = f"no worker became ready within {self._config.queue_timeout_s} s"
                effects += self._fail(flow, Rejected(RejectReason.NO_WORKER, message))
            elif now >= flow.deadline_s:
                message = f"not done within {self._config.request_timeout_s} s"
                effects += self._fail(flow, Rejected(RejectReason.TIMEOUT, message))
        return effects

    def _plan(self, flow: _Flow, now: float) -> list[Effect]:
        choice = choose(flow.request, flow.placement, self._view, self._config.local_prefill_cost)
        if choice is None:
            return []
        flow.attempt += 1
        flow.outputs = [_Output() for _ in range(flow.request.num_choices)]
        flow.attempt_id = f"{flow.request.request_id}#{self._router_id}.{next(self._serials)}"
        flow.choice = choice
        self._attempts[flow.attempt_id] = flow
        num_tokens = flow.request.num_prompt_tokens
        self._view.assign(choice.decode, num_tokens)
        self._view.prefills(choice.prefill or choice.decode).begin(num_tokens)
        flow.prefill_open, flow.prefill_begun_s = True, now
        request = replace(flow.request, request_id=flow.attempt_id)
        planned = Planned(flow.request.request_id, flow.attempt, flow.attempt_id, choice, now - flow.arrived_s)
        if choice.prefill is None:
            flow.move(Stage.DECODING)
            return [planned, Send(choice.decode, StartGeneration(request))]
        flow.move(Stage.RESERVING)
        self._view.assign(choice.prefill, num_tokens)
        return [planned, Send(choice.decode, ReserveBlocks(request, flow.attempt_id, choice.prefill))]

    def _reserved(self, answer: Reserved, now: float) -> list[Effect]:
        flow = self._attempts.get(answer.request_id)
        if flow is None or flow.stage is not Stage.RESERVING or flow.choice is None or flow.choice.prefill is None:
            return []
        flow.move(Stage.PREFILLING)
        flow.prefill_begun_s = now
        request = replace(flow.request, request_id=flow.attempt_id)
        return [Send(flow.choice.prefill, StartPrefill(request, answer.ticket))]

    def _refused(self, worker: WorkerRef, answer: Refused, now: float) -> list[Effect]:
        flow = self._attempts.get(answer.request_id)
        if flow is None:
            return []
        match answer.reason:
            case RefuseReason.BAD_REQUEST:
                return self._fail(flow, BadRequest("prompt", answer.message))
            case RefuseReason.NO_BLOCKS:
                return self._fail(flow, Rejected(RejectReason.QUEUE_TIMEOUT, answer.message))
            case RefuseReason.TRANSFER_FAILED:
                return self._plan_again(flow, TransferFailed(f"{worker}: {answer.message}"), now)
            case RefuseReason.DRAINING:
                self._view.draining(worker)
                return self._plan_again(flow, WorkerLost(worker.worker_id, "draining"), now)
            case _:
                assert_never(answer.reason)

    def _tokens(self, worker: WorkerRef, delta: TokenDelta, now: float) -> list[Effect]:
        flow = self._attempts.get(delta.request_id)
        if flow is None or flow.choice is None:
            return []
        if worker == flow.choice.prefill and flow.stage is Stage.PREFILLING:
            flow.move(Stage.DECODING)
        if flow.prefill_open and flow.stage is Stage.DECODING and worker == (flow.choice.prefill or worker):
            computed_tokens = delta.usage.computed_tokens if delta.usage else flow.request.num_prompt_tokens
            self._view.prefills(worker).learn(flow.prefill_begun_s, now, computed_tokens)
            self._close_prefill(flow)
        request_id = flow.request.request_id
        ready = flow.outputs[delta.choice].take(delta)
        if not ready:
            return []
        broken = ready[-1].finish_reason in FAILURES
        over = broken or all(output.ended for output in flow.outputs)
        effects: list[Effect] = [
            Deliver(request_id, replace(item, request_id=request_id), last=over and item is ready[-1]) for item in ready
        ]
        if over:
            if broken or worker == flow.choice.prefill:
                effects += self._recall(flow)  # decode does not know yet that nothing is left to do
            self._end(flow)
        return effects

    def _plan_again(self, flow: _Flow, error: TandemError, now: float) -> list[Effect]:
        """A new attempt while the client has seen nothing; the error once it has, or when attempts run out."""
        if any(output.next_position for output in flow.outputs) or flow.attempt >= self._config.max_attempts:
            return self._fail(flow, error)
        effects = self._recall(flow)
        self._close(flow)
        flow.move(Stage.QUEUED)
        flow.queue_deadline_s = now + self._config.queue_timeout_s
        return effects + self._plan(flow, now)

    def _fail(self, flow: _Flow, error: TandemError) -> list[Effect]:
        effects = self._recall(flow)
        self._end(flow)
        return [*effects, Fail(flow.request.request_id, error)]

    def _recall(self, flow: _Flow) -> list[Effect]:
        """Tell every living worker of the current attempt to free what it holds."""
        if flow.choice is None or flow.stage is Stage.QUEUED:
            return []
        workers = [flow.choice.decode]
        if flow.choice.prefill is not None and flow.prefill_open:
            workers.append(flow.choice.prefill)
        return [Send(ref, CancelRequest(flow.attempt_id)) for ref in workers if self._view.get(ref) is not None]

    def _end(self, flow: _Flow) -> None:
        if flow.stage is not Stage.QUEUED:
            self._close(flow)
        flow.move(Stage.DONE)
        del self._flows[flow.request.request_id]

    def _close(self, flow: _Flow) -> None:
        """Take the current attempt off the workers' books."""
        del self._attempts[flow.attempt_id]
        self._close_prefill(flow)
        if flow.choice is not None:
            self._view.unassign(flow.choice.decode, flow.request.num_prompt_tokens)

    def _close_prefill(self, flow: _Flow) -> None:
        if not flow.prefill_open or flow.choice is None:
            return
        flow.prefill_open = False
        self._view.prefills(flow.choice.prefill or flow.choice.decode).end(flow.request.num_prompt_tokens)
        if flow.choice.prefill is not None:
            self._view.unassign(flow.choice.prefill, flow.request.num_prompt_tokens)
