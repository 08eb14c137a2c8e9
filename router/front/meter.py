"""What one request leaves behind: its counters, its latencies, one log line, and the outermost span of its trace."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import StrEnum
from statistics import fmean
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from core.errors import BadRequest, Rejected, Unauthenticated
from core.request import FinishReason, GenerateRequest
from router.admission.admission import band_of
from router.admission.policy import Band
from router.front.timeline import Timeline
from router.front.usage import Usage
from telemetry.logs import log_state
from telemetry.router_metrics import Outcome, RouterMetrics

if TYPE_CHECKING:  # it loads OpenTelemetry
    from telemetry.tracing import Span

logger = logging.getLogger(__name__)

_LEFT: Final = (asyncio.CancelledError, GeneratorExit, ConnectionError)
# What OpenTelemetry's GenAI conventions have a name for; the rest of the log line is `tandem.*`.
_GEN_AI: Final = {
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "seed": "gen_ai.request.seed",
}


class Endpoint(StrEnum):
    """Where a request came in."""

    CHAT = "chat_completions"
    COMPLETIONS = "completions"
    GRPC = "grpc_generate"


class Meter:
    """A context around one request, from its arrival until its last byte is out."""

    def __init__(
        self,
        metrics: RouterMetrics,
        endpoint: Endpoint,
        request_id: str,
        clock: Callable[[], float],
        span: Span | None = None,
    ) -> None:
        self._metrics = metrics
        self._endpoint = endpoint
        self._clock = clock
        self._request_id = request_id
        self._span = span
        self._arrived_s = clock()
        self._outputs: dict[int, Timeline] = {}  # by choice
        self._request: GenerateRequest | None = None
        self._band = Band.INTERACTIVE
        self._finish_reason: FinishReason | None = None
        self._usage: Usage | None = None
        self._failure: Exception | None = None

    def __enter__(self) -> Self:
        self._metrics.open_requests.inc()
        self._metrics.vllm.waiting.inc()
        return self

    def accepted(self, request: GenerateRequest) -> GenerateRequest:
        """The request passed the front's checks and goes to the dispatcher, with its place in the trace."""
        self._request, self._band = request, band_of(request)
        self._metrics.prompt_tokens.inc(request.num_prompt_tokens)
        if request.adapter is not None:
            self._metrics.adapter_requests.labels(request.adapter.name).inc()
        self._metrics.vllm.prompt_tokens.observe(request.num_prompt_tokens)
        self._metrics.vllm.all_prompt_tokens.inc(request.num_prompt_tokens)
        return request if self._span is None else replace(request, traceparent=self._span.traceparent)

    def tokens(self, count: int, choice: int) -> None:
        """`count` tokens of a choice go out now."""
        if count == 0:
            return
        now_s = self._clock()
        if not self._outputs:
            self._first_token(now_s - self._arrived_s)
        output = self._outputs.setdefault(choice, Timeline(self._arrived_s))
        if output.last_token_s is not None:
            gap_s = (now_s - output.last_token_s) / count
            self._metrics.vllm.inter_token_s.observe(gap_s)
            self._metrics.slo.gap(self._band, gap_s)
        output.tokens(count, now_s)
        self._metrics.output_tokens.inc(count)
        self._metrics.vllm.all_output_tokens.inc(count)

    def finished(self, reason: FinishReason, usage: Usage) -> None:
        """The generation came to its own end."""
        self._finish_reason = reason
        self._usage = usage
        self._metrics.kv_bytes_moved.inc(usage.kv_bytes_moved)
        self._metrics.vllm.prefix_queries.inc(usage.prompt_tokens)
        self._metrics.vllm.prefix_hits.inc(usage.cached_tokens)

    def failed(self, error: Exception) -> None:
        """The client was told of `error` in the stream, so that nothing is raised any more."""
        self._failure = error

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, traceback: TracebackType | None
    ) -> None:
        error = raised or self._failure
        outcome = self._outcome(error)
        vllm = self._metrics.vllm
        self._metrics.open_requests.dec()
        (vllm.running if self._outputs else vllm.waiting).dec()
        self._metrics.requests.labels(self._endpoint, outcome).inc()
        if isinstance(error, Rejected):
            self._metrics.rejected.labels(error.reason).inc()
        for tpot_s in self._tpots_s:
            self._metrics.tpot_s.observe(tpot_s)
            vllm.tpot_s.observe(tpot_s)
        self._count_slo(outcome)
        if outcome is Outcome.OK and self._finish_reason is not None:
            vllm.finished(self._finish_reason)
            vllm.output_tokens.observe(self._num_output_tokens)
            vllm.end_to_end_s.observe(self._clock() - self._arrived_s)
        fields = self._fields(outcome, error)
        log_state(logger, request_id=self._request_id, state="ended", **fields)
        if self._span is not None:
            self._end_span(self._span, fields, outcome, error)

    def _count_slo(self, outcome: Outcome) -> None:
        """Not of a caller that was wrong, or left while it could still be served in time."""
        failed = outcome in (Outcome.REJECTED, Outcome.FAILED)
        ttfts_s = self._ttfts_s
        if outcome in (Outcome.BAD_REQUEST, Outcome.UNAUTHENTICATED):
            return
        waited_s = math.inf if failed else self._clock() - self._arrived_s
        if ttfts_s or failed or waited_s > self._metrics.slo.targets.ttft_s:
            self._metrics.slo.ended(self._band, min(ttfts_s, default=waited_s), self._tpots_s, failed=failed)

    @property
    def _ttfts_s(self) -> list[float]:
        return [output.ttft_s for output in self._outputs.values() if output.ttft_s is not None]

    @property
    def _tpots_s(self) -> list[float]:
        return [output.tpot_s for output in self._outputs.values() if output.tpot_s is not None]

    @property
    def _num_output_tokens(self) -> int:
        return sum(output.output_tokens for output in self._outputs.values())

    def _first_token(self, ttft_s: float) -> None:
        self._metrics.ttft_s.observe(ttft_s)
        self._metrics.vllm.ttft_s.observe(ttft_s)
        self._metrics.vllm.waiting.dec()
        self._metrics.vllm.running.inc()

    def _outcome(self, error: BaseException | None) -> Outcome:
        """A client that leaves after the last token has had all it asked for."""
        match error:
            case BadRequest():
                return Outcome.BAD_REQUEST
            case Unauthenticated():
                return Outcome.UNAUTHENTICATED
            case Rejected():
                return Outcome.REJECTED
            case None if self._finish_reason is None:
                return Outcome.FAILED
            case None:
                return Outcome.OK
            case _ if isinstance(error, _LEFT):
                return Outcome.CANCELLED if self._finish_reason is None else Outcome.OK
            case _:
                return Outcome.FAILED

    def _fields(self, outcome: Outcome, error: BaseException | None) -> dict[str, Any]:
        request, usage, tpots_s = self._request, self._usage, self._tpots_s
        return {
            "trace_id": None if self._span is None else self._span.trace_id,
            "endpoint": self._endpoint,
            "outcome": outcome,
            "finish_reason": self._finish_reason,
            "tenant": (request.tenant or None) if request else None,
            "adapter": request.adapter.name if request and request.adapter else None,
            "prompt_tokens": request.num_prompt_tokens if request else None,
            "choices": request.num_choices if request and request.num_choices > 1 else None,
            "output_tokens": self._num_output_tokens,
            "cached_tokens": usage.cached_tokens if usage else None,
            "seed": request.sampling.seed if request and request.sampling.temperature > 0 else None,
            "ttft_s": min(self._ttfts_s, default=None),
            "tpot_s": fmean(tpots_s) if tpots_s else None,
            "reason": error.reason if isinstance(error, Rejected) else None,
            "error": None if error is None else str(error) or type(error).__name__,
        }

    def _end_span(self, span: Span, fields: Mapping[str, Any], outcome: Outcome, error: BaseException | None) -> None:
        span.set({_GEN_AI.get(name, f"tandem.{name}"): value for name, value in fields.items()})
        span.set({"tandem.request_id": self._request_id})
        if self._finish_reason is not None:
            span.set({"gen_ai.response.finish_reasons": (self._finish_reason,)})
        if outcome is Outcome.OK or error is None:
            span.end()
        else:
            span.set({"error.type": error.reason if isinstance(error, Rejected) else type(error).__name__})
            span.end(str(error) or type(error).__name__)
