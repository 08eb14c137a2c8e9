"""The one way through that every front shares.

1. `meter()` opens the request's books; 2. `prepare()` checks and tokenises, before any worker is touched;
3. `generate()` asks the dispatcher for tokens and turns them into text. Leaving the generator early, for whatever
reason, closes the dispatcher's, which cancels the request on every worker.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from core.errors import BadRequest, InvariantBroken
from core.request import FinishReason, GenerateRequest, Placement, PromptLogprobs, TokenDelta, TokenLogprobs
from engine.stop import StopStrings
from engine.tokenizer import IncrementalDecoder, Tokenizer
from router.admission.policy import AdmissionPolicy
from router.front.caller import Caller, Keys, degraded
from router.front.errors import GenerationFailed
from router.front.intake import Draft, GrammarCheck, Intake, ServedModel
from router.front.meter import Endpoint, Meter
from router.front.spelling import Speller
from router.front.usage import Usage, UsageSum
from telemetry.router_metrics import RouterMetrics

if TYPE_CHECKING:  # it loads OpenTelemetry
    from telemetry.tracing import Span, Tracer


class TokenSource(Protocol):
    """Finds workers for a request and merges what they send (router/live.py)."""

    def generate(
        self, request: GenerateRequest, placement: Placement, max_ttft_s: float | None
    ) -> AsyncGenerator[TokenDelta, None]:
        """Each output position of each choice exactly once, in order; the last delta of each has a finish reason.
        max_ttft_s: the caller would rather be refused than wait longer for the first token.

        Closing it cancels the request on every worker. Raises what core/errors.py lists, at any time: also a
        stream may have to wait for workers, and find none.
        """
        ...


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What is new of one choice since its last one. Text may lag behind tokens while a character or a stop string is
    incomplete; `usage` counts everything so far, of all choices. Exactly the last one of each choice has a finish
    reason, STOP or LENGTH; `last` is the last one of all."""

    token_ids: tuple[int, ...]
    text: str
    usage: Usage
    finish_reason: FinishReason | None = None
    matched_stop: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, where the request asks for them
    choice: int = 0
    last: bool = False
    prompt_logprobs: PromptLogprobs | None = None  # with the first delta of all, where the request asks for them


class Front:
    """Serves one model through a dispatcher."""

    def __init__(
        self,
        dispatcher: TokenSource,
        tokenizer: Tokenizer,
        model: ServedModel,
        metrics: RouterMetrics,
        check_grammar: GrammarCheck,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        new_request_id: Callable[[], str] = lambda: secrets.token_hex(12),
        tracer: Tracer | None = None,
    ) -> None:
        self.model = model
        self.metrics = metrics
        self.wall_clock = wall_clock
        self.new_request_id = new_request_id
        self._dispatcher = dispatcher
        self._tokenizer = tokenizer
        self._intake = Intake(tokenizer, model, check_grammar)
        self._clock = clock
        self._tracer = tracer
        self._policy = AdmissionPolicy()
        self._keys = Keys(self._policy)

    def apply(self, policy: AdmissionPolicy) -> None:
        """Whose keys are known, what is cut short and which model answers, from now on.

        Raises: BadRequest: it names a model that is not served here. Then nothing changes.
        """
        for asked, answers in policy.degrade.smaller_model.items():
            for name in (asked, answers):
                self._intake.require_served(f"admission.degrade.smaller_model.{asked}", name)
        self._policy = policy
        self._keys = Keys(policy)

    def caller(self, authorization: str | None, slo_ttft_ms: str | None) -> Caller:
        """Who asks. Raises: Unauthenticated; BadRequest: naming the header."""
        return self._keys.caller(authorization, slo_ttft_ms)

    def meter(self, endpoint: Endpoint, request_id: str, traceparents: Sequence[str] = ()) -> Meter:
        """The books of a request that arrives now; enter it before anything can fail. traceparents: that it came with;
        of two neither counts."""
        span = None if self._tracer is None else self._span(self._tracer, endpoint, traceparents)
        return Meter(self.metrics, endpoint, request_id, self._clock, span)

    def _span(self, tracer: Tracer, endpoint: Endpoint, traceparents: Sequence[str]) -> Span | None:
        parent = traceparents[0] if len(traceparents) == 1 else None
        operation = "chat" if endpoint is Endpoint.CHAT else "text_completion"
        span = tracer.start(f"{operation} {self.model.name}", parent, serves=True)
        if span is not None:
            span.set({"gen_ai.operation.name": operation, "gen_ai.request.model": self.model.name})
        return span

    def speller(self) -> Speller:
        """Spells the tokens of one output."""
        return Speller(self._tokenizer)

    async def prepare(self, draft: Draft, caller: Caller) -> GenerateRequest:
        """Check and tokenise. Raises: BadRequest: naming the field in Draft's words. Rejected: see Intake.prepare."""
        model = self._policy.degrade.smaller_model.get(draft.model, draft.model)
        draft = replace(draft, tenant=caller.tenant, model=model)
        return degraded(await self._intake.prepare(draft), self._policy)

    async def generate(
        self, request: GenerateRequest, placement: Placement, meter: Meter, max_ttft_s: float | None = None
    ) -> AsyncGenerator[TextDelta, None]:
        """Stream the output of a prepared request. max_ttft_s: as in TokenSource.

        Raises: Rejected, WorkerLost, TransferFailed: as the dispatcher does;
            GenerationFailed: a worker ended it with ERROR or ABORT; BadRequest: on `grammar`: with DEAD_END.
        """
        request = meter.accepted(request)
        async with aclosing(self._dispatcher.generate(request, placement, max_ttft_s)) as token_deltas:
            outputs = _Outputs(request, self._tokenizer)
            async for token_delta in token_deltas:
                delta = outputs.push(token_delta)
                if delta is None:
                    continue
                meter.tokens(len(delta.token_ids), delta.choice)
                if delta.last and delta.finish_reason is not None:
                    meter.finished(delta.finish_reason, delta.usage)
                yield delta
                if delta.last:
                    return
        raise InvariantBroken(f"request {request.request_id}: the dispatcher's stream ended without a finish")


class _Outputs:
    """Turns one request's tokens into text, choice by choice, and adds up usage."""

    def __init__(self, request: GenerateRequest, tokenizer: Tokenizer) -> None:
        self._open = {choice: _Output(request, tokenizer.decoder()) for choice in range(request.num_choices)}
        self._usage = UsageSum(request.num_prompt_tokens)

    def push(self, delta: TokenDelta) -> TextDelta | None:
        """The text that became certain with `delta`; None when its choice has ended.

        Raises: GenerationFailed: a worker ended it with ERROR or ABORT; BadRequest: with DEAD_END.
        """
        if delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            raise GenerationFailed(delta.finish_reason, delta.message)
        if delta.finish_reason is FinishReason.DEAD_END:
            raise BadRequest("grammar", delta.message)
        output = self._open.get(delta.choice)
        if output is None:
            return None
        self._usage.add(len(delta.token_ids), delta.usage)
        text, finish_reason, matched = output.push(delta)
        if finish_reason is not None:
            del self._open[delta.choice]
        return TextDelta(
            delta.token_ids,
            text,
            self._usage.total(),
            finish_reason,
            matched,
            delta.logprobs,
            delta.choice,
            last=not self._open,
            prompt_logprobs=delta.prompt_logprobs,
        )


class _Output:
    """Turns one choice's tokens into text: detokenises, watches for stop strings.

    Workers search the same text with the same class, so both sides end at the same token.
    """

    def __init__(self, request: GenerateRequest, decoder: IncrementalDecoder) -> None:
        self._request = request
        self._decoder = decoder
        self._stops = StopStrings(request.stop.stop_strings)

    def push(self, delta: TokenDelta) -> tuple[str, FinishReason | None, str | None]:
        """The text that became certain with `delta`, why the choice ends with it, and the stop string that ends it."""
        text, matched = self._search(delta)
        finish_reason = delta.finish_reason
        if matched is not None:
            finish_reason = FinishReason.STOP
        elif finish_reason is not None:
            tail, matched = self._flush(delta.matched_stop)
            text += tail
        return text, finish_reason, matched

    def _search(self, delta: TokenDelta) -> tuple[str, str | None]:
        """New text and the stop string it completes; text of the tokens before `min_tokens` is not searched."""
        unsearched = max(0, min(len(delta.token_ids), self._request.stop.min_tokens - 1 - delta.position))
        text = self._decoder.push(delta.token_ids[:unsearched]) if unsearched else ""
        result = self._stops.push(self._decoder.push(delta.token_ids[unsearched:]))
        return text + result.text, result.matched

    def _flush(self, matched_stop: str | None) -> tuple[str, str | None]:
        """At a finish that no stop string caused: what was held back, and a stop string completed by it."""
        result = self._stops.push(self._decoder.finish())
        if result.matched is not None or matched_stop is not None:
            return result.text, result.matched or matched_stop
        return result.text + self._stops.finish(), None
