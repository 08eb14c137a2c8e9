"""The spans of a router's traced requests, made of what its dispatcher says and is told.

Under the span that the edge opened (router/front/meter.py): `wait` until workers are chosen, then an `attempt` for each
plan, which says why these workers; in it `reserve`, `prefill` and `decode`. An attempt that came to nothing ends with
its reason, and the next one follows. What workers do hangs below the attempt. A request that is not traced has no
`traceparent`, and costs a look into an empty dict.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from core.membership import WorkerRef
from core.messages import (
    Answer,
    CancelRequest,
    Command,
    Refused,
    ReserveBlocks,
    Reserved,
    StartGeneration,
    StartPrefill,
    StepOutput,
)
from core.request import GenerateRequest, TokenDelta
from router.effects import Planned

if TYPE_CHECKING:  # it loads OpenTelemetry
    from telemetry.tracing import Span, Tracer


@dataclass(slots=True)
class _Attempt:
    """phase_name: reserve, prefill or decode."""

    request_id: str
    plan: Planned
    span: Span
    phase: Span | None = None
    phase_name: str = ""
    error: str | None = None


@dataclass(slots=True)
class _Request:
    """waiting_since_ns: while no workers are chosen."""

    parent: str
    waiting_since_ns: int | None
    attempts: set[str] = field(default_factory=set)


class RequestTraces:
    """Of all open requests of one router. tracer: None when nothing is traced."""

    def __init__(self, tracer: Tracer | None) -> None:
        self._tracer = tracer
        self._requests: dict[str, _Request] = {}
        self._attempts: dict[str, _Attempt] = {}  # by attempt id
        self._left: list[_Request] = []  # an attempt of theirs ended with one of the effects that are being performed

    def begin(self, request: GenerateRequest) -> None:
        """It goes to the dispatcher now."""
        if self._tracer is not None and request.traceparent:
            self._requests[request.request_id] = _Request(request.traceparent, time.time_ns())

    def planned(self, effect: Planned) -> None:
        """Workers were chosen."""
        request = self._requests.get(effect.request_id)
        if request is None or self._tracer is None:
            return
        self._end_wait(request, None)
        span = self._tracer.start("attempt", request.parent)
        if span is None:
            return
        plan = effect.plan
        span.set(
            {
                "tandem.attempt": effect.attempt,
                "tandem.attempt_id": effect.attempt_id,
                "tandem.hedge": effect.hedge or None,
                "tandem.reason": plan.reason,
                "tandem.decode_worker": str(plan.decode),
                "tandem.prefill_worker": None if plan.prefill is None else str(plan.prefill),
                "tandem.scores": tuple(map(str, plan.scores)),
            }
        )
        attempt = self._attempts[effect.attempt_id] = _Attempt(effect.request_id, effect, span)
        request.attempts.add(effect.attempt_id)
        self._enter(attempt, "prefill" if plan.prefill is None else "reserve")

    def outgoing(self, command: Command) -> Command:
        """What a worker is told, with its place in the trace."""
        if self._attempts:
            match command:
                case StartGeneration(request) | ReserveBlocks(request) | StartPrefill(request):
                    attempt = self._attempts.get(request.request_id)
                    if attempt is not None:
                        return replace(command, request=replace(request, traceparent=attempt.span.traceparent))
                case CancelRequest(attempt_id):
                    self._end_attempt(attempt_id, "recalled")
        return command

    def heard(self, answer: Answer) -> None:
        """What a worker said."""
        if not self._attempts:
            return
        match answer:
            case StepOutput(deltas):
                for delta in deltas:
                    if (attempt := self._attempts.get(delta.request_id)) is not None:
                        self._tokens(attempt, delta)
            case Reserved(attempt_id):
                if (attempt := self._attempts.get(attempt_id)) is not None and attempt.phase_name == "reserve":
                    self._enter(attempt, "prefill")
            case Refused(attempt_id, reason, message):
                if (attempt := self._attempts.get(attempt_id)) is not None:
                    attempt.error = f"{reason}: {message}" if message else reason.value

    def worker_lost(self, worker: WorkerRef) -> None:
        """What was there goes on elsewhere."""
        for attempt_id, attempt in list(self._attempts.items()):
            plan, computing = attempt.plan.plan, attempt.phase_name != "decode"
            if worker == plan.decode or (worker == plan.prefill and computing):
                self._end_attempt(attempt_id, f"lost {worker}")

    def settled(self) -> None:
        """What was to be done at once is done: who has no workers now waits."""
        for request in self._left:
            if not request.attempts and request.waiting_since_ns is None:
                request.waiting_since_ns = time.time_ns()
        self._left.clear()

    def end(self, request_id: str, error: str | None = None) -> None:
        """Nothing more is wanted of it. error: why it failed. Unknown ids are ignored."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        if error is not None:
            self._end_wait(request, error)
        for attempt_id in request.attempts & self._attempts.keys():
            self._close(self._attempts.pop(attempt_id), error)

    def _tokens(self, attempt: _Attempt, delta: TokenDelta) -> None:
        if (usage := delta.usage) is not None:
            computed = {
                "tandem.cached_tokens": usage.cached_tokens,
                "tandem.fetched_tokens": usage.fetched_tokens,
                "tandem.computed_tokens": usage.computed_tokens,
                "tandem.kv_bytes_received": usage.kv_bytes_received,
            }
            (attempt.phase or attempt.span).set(computed)
        if attempt.phase_name == "prefill":
            self._enter(attempt, "decode")

    def _enter(self, attempt: _Attempt, phase_name: str) -> None:
        assert self._tracer is not None
        if attempt.phase is not None:
            attempt.phase.end()
        attempt.phase = self._tracer.start(phase_name, attempt.span.traceparent)
        attempt.phase_name = phase_name

    def _end_attempt(self, attempt_id: str, error: str) -> None:
        attempt = self._attempts.pop(attempt_id, None)
        if attempt is None:
            return
        self._close(attempt, attempt.error or error)
        request = self._requests.get(attempt.request_id)
        if request is not None:
            request.attempts.discard(attempt_id)
            self._left.append(request)

    def _close(self, attempt: _Attempt, error: str | None) -> None:
        if attempt.phase is not None:
            attempt.phase.end(error)
        attempt.span.end(error)

    def _end_wait(self, request: _Request, error: str | None) -> None:
        if request.waiting_since_ns is None or self._tracer is None:
            return
        span = self._tracer.start("wait", request.parent, start_ns=request.waiting_since_ns)
        request.waiting_since_ns = None
        if span is not None:
            span.end(error)
