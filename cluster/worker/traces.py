"""The spans of a worker's part in traced requests, made of what it is told and of what comes of it.

A `prefill worker` span has `queue`, `compute` and `transfer`, which ends with the hand-off; a `decode worker` span has
`reserve`, `receive` and `decode`, or `queue`, `prefill` and `decode` where the prompt is computed there. Both hang
below the attempt of the router. A request that is not traced costs a look into an empty dict.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from core.membership import WorkerRef
from core.messages import Answer, Refused, ReserveBlocks, Reserved, StartGeneration, StartPrefill
from engine.step import Progress
from kv_transfer.driver import HandoffOutcome
from kv_transfer.effects import SourceEnded, TargetFailed, TargetLanded
from telemetry.open_tracer import close_tracer

if TYPE_CHECKING:  # it loads OpenTelemetry
    from telemetry.tracing import Span, Tracer


@dataclass(slots=True)
class _Work:
    """phases: open ones, by name."""

    span: Span
    is_prefill: bool
    phases: dict[str, Span] = field(default_factory=dict)


class WorkerTraces:
    """Of one worker. A hand-off has the id of its attempt. tracer: None when nothing is traced."""

    def __init__(self, tracer: Tracer | None, worker: WorkerRef) -> None:
        self._tracer = tracer
        self._worker = str(worker)
        self._open: dict[str, _Work] = {}  # by attempt id

    def begin(self, command: StartGeneration | ReserveBlocks | StartPrefill) -> None:
        """A router's command came in."""
        request = command.request
        if self._tracer is None or not request.traceparent:
            return
        is_prefill = isinstance(command, StartPrefill)
        name = "prefill worker" if is_prefill else "decode worker"
        span = self._tracer.start(name, request.traceparent, serves=True)
        if span is None:
            return
        span.set({"tandem.attempt_id": request.request_id, "tandem.worker": self._worker})
        self._open[request.request_id] = _Work(span, is_prefill)
        self._enter(request.request_id, "reserve" if isinstance(command, ReserveBlocks) else "queue")

    def answered(self, answer: Answer) -> None:
        """What the router is told, but tokens."""
        match answer:
            case Reserved(attempt_id):
                self._leave(attempt_id, "reserve")
                self._enter(attempt_id, "receive")
            case Refused(attempt_id, reason, message):
                self.end(attempt_id, f"{reason}: {message}" if message else reason.value)

    def handoff_ended(self, outcome: HandoffOutcome) -> None:
        match outcome:
            case TargetLanded(handoff_id, blocks):
                self._leave(handoff_id, "receive", num_blocks=len(blocks))
                self._enter(handoff_id, "decode")
            case SourceEnded(handoff_id, landed):
                self.end(handoff_id, None if landed else "did not land")
            case TargetFailed():
                pass  # the router is told, too

    def stepped(self, progress: Iterable[Progress]) -> None:
        """What one engine step did."""
        if not self._open:
            return
        for item in progress:
            work = self._open.get(item.request_id)
            if work is not None:
                self._progressed(work, item)

    def end(self, attempt_id: str, error: str | None = None) -> None:
        """Nothing more is done for it here. Unknown ids are ignored."""
        work = self._open.pop(attempt_id, None)
        if work is not None:
            for span in (*work.phases.values(), work.span):
                span.end(error)

    async def close(self) -> None:
        """Send what has ended, for a bounded time."""
        await close_tracer(self._tracer)

    def _progressed(self, work: _Work, item: Progress) -> None:
        attempt_id = item.request_id
        if "queue" in work.phases:
            self._leave(attempt_id, "queue")
            self._enter(attempt_id, "compute" if work.is_prefill else "prefill")
            if work.is_prefill:
                self._enter(attempt_id, "transfer")
        computing = work.phases.get("compute") or work.phases.get("prefill")
        if computing is not None:
            computing.event("chunk", {"tandem.computed_tokens": item.num_computed})
        for delta in item.deltas:
            if delta.usage is not None:
                found = {"cached": delta.usage.cached_tokens, "computed": delta.usage.computed_tokens}
                work.span.set({f"tandem.{name}_tokens": number for name, number in found.items()})
        if work.is_prefill and item.ended:
            self._leave(attempt_id, "compute")
        elif "prefill" in work.phases and item.deltas:
            self._leave(attempt_id, "prefill")
            self._enter(attempt_id, "decode")
        if item.ended and "transfer" not in work.phases:
            self.end(attempt_id)

    def _enter(self, attempt_id: str, phase: str) -> None:
        work = self._open.get(attempt_id)
        if work is not None and self._tracer is not None:
            span = self._tracer.start(phase, work.span.traceparent)
            if span is not None:
                work.phases[phase] = span

    def _leave(self, attempt_id: str, phase: str, **numbers: int) -> None:
        work = self._open.get(attempt_id)
        span = None if work is None else work.phases.pop(phase, None)
        if span is not None:
            span.set({f"tandem.{name}": number for name, number in numbers.items()})
            span.end()
