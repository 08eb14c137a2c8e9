"""Requests and what comes of them, as protobuf (proto/tandem/v1/worker.proto, logprobs.proto)."""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

from tandem.v1 import logprobs_pb2
from tandem.v1 import worker_pb2 as pb

from core.errors import BadRequest
from core.request import (
    FinishReason,
    GenerateRequest,
    Grammar,
    GrammarKind,
    PromptLogprobs,
    SamplingParams,
    StopConditions,
    TokenDelta,
    TokenLogprobs,
    WorkUsage,
)
from kv_transfer.membership_codec import decode_adapter, encode_adapter

Reason = TypeVar("Reason", bound=StrEnum)


def encode_request(request: GenerateRequest) -> pb.WorkerRequest:
    sampling, stop = request.sampling, request.stop
    return pb.WorkerRequest(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        max_tokens=stop.max_tokens,
        min_tokens=stop.min_tokens,
        stop_token_ids=stop.stop_token_ids,
        stop_strings=stop.stop_strings,
        ignore_eos=stop.ignore_eos,
        cache_salt=request.cache_salt,
        tenant=request.tenant,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias),
        top_logprobs=sampling.top_logprobs,
        priority=request.priority,
        num_choices=request.num_choices,
        grammar=_encode_grammar(request.grammar),
        output_token_ids=request.output_token_ids,
        prompt_logprobs=request.prompt_logprobs,
        traceparent=request.traceparent,
        adapter=encode_adapter(request.adapter) if request.adapter is not None else None,
    )


def decode_request(message: pb.WorkerRequest) -> GenerateRequest:
    """Raises BadRequest: a field out of range, or a kind of grammar that this revision does not know."""
    return GenerateRequest(
        request_id=message.request_id,
        prompt_token_ids=tuple(message.prompt_token_ids),
        sampling=SamplingParams(
            temperature=message.temperature,
            top_p=message.top_p,
            top_k=message.top_k,
            seed=message.seed,
            min_p=message.min_p,
            repetition_penalty=message.repetition_penalty,
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            logit_bias=tuple(sorted(message.logit_bias.items())),
            top_logprobs=message.top_logprobs if message.HasField("top_logprobs") else None,
        ),
        stop=StopConditions(
            max_tokens=message.max_tokens,
            min_tokens=message.min_tokens,
            stop_token_ids=tuple(message.stop_token_ids),
            stop_strings=tuple(message.stop_strings),
            ignore_eos=message.ignore_eos,
        ),
        cache_salt=message.cache_salt,
        tenant=message.tenant,
        priority=message.priority,
        num_choices=message.num_choices,
        grammar=_decode_grammar(message.grammar) if message.HasField("grammar") else None,
        output_token_ids=tuple(message.output_token_ids),
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        traceparent=message.traceparent,
        adapter=decode_adapter(message.adapter) if message.HasField("adapter") else None,
    )


def _encode_grammar(grammar: Grammar | None) -> pb.Grammar | None:
    return pb.Grammar(kind=grammar.kind, source=grammar.source) if grammar is not None else None


def _decode_grammar(message: pb.Grammar) -> Grammar:
    return Grammar(decode_reason(GrammarKind, message.kind), message.source)


def encode_delta(delta: TokenDelta) -> pb.TokenDelta:
    return pb.TokenDelta(
        request_id=delta.request_id,
        position=delta.position,
        token_ids=delta.token_ids,
        finish_reason=delta.finish_reason or "",
        matched_stop=delta.matched_stop or "",
        message=delta.message,
        usage=_encode_usage(delta.usage) if delta.usage is not None else None,
        logprobs=[encode_logprobs(item) for item in delta.logprobs],
        choice=delta.choice,
        prompt_logprobs=encode_prompt_logprobs(delta.prompt_logprobs),
    )


def decode_delta(message: pb.TokenDelta) -> TokenDelta:
    """Raises BadRequest: a finish reason that this revision does not know."""
    return TokenDelta(
        request_id=message.request_id,
        position=message.position,
        token_ids=tuple(message.token_ids),
        finish_reason=decode_reason(FinishReason, message.finish_reason) if message.finish_reason else None,
        matched_stop=message.matched_stop or None,
        message=message.message,
        usage=_decode_usage(message.usage) if message.HasField("usage") else None,
        logprobs=tuple(map(_decode_logprobs, message.logprobs)),
        choice=message.choice,
        prompt_logprobs=_decode_prompt_logprobs(message.prompt_logprobs)
        if message.HasField("prompt_logprobs")
        else None,
    )


def encode_logprobs(logprobs: TokenLogprobs) -> logprobs_pb2.TokenLogprobs:
    top = [logprobs_pb2.TokenLogprob(token_id=token_id, logprob=value) for token_id, value in logprobs.top]
    return logprobs_pb2.TokenLogprobs(drawn=logprobs.drawn, top=top)


def _decode_logprobs(message: logprobs_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(message.drawn, tuple((item.token_id, item.logprob) for item in message.top))


def encode_prompt_logprobs(logprobs: PromptLogprobs | None) -> logprobs_pb2.PromptLogprobs | None:
    if logprobs is None:
        return None
    return logprobs_pb2.PromptLogprobs(
        num_top=logprobs.num_top,
        logprobs=logprobs.logprobs,
        ranks=logprobs.ranks,
        top_ids=logprobs.top_ids,
        top_logprobs=logprobs.top_logprobs,
    )


def _decode_prompt_logprobs(message: logprobs_pb2.PromptLogprobs) -> PromptLogprobs:
    return PromptLogprobs(
        message.num_top,
        tuple(message.logprobs),
        tuple(message.ranks),
        tuple(message.top_ids),
        tuple(message.top_logprobs),
    )


def _encode_usage(usage: WorkUsage) -> pb.WorkUsage:
    return pb.WorkUsage(
        cached_tokens=usage.cached_tokens,
        fetched_tokens=usage.fetched_tokens,
        computed_tokens=usage.computed_tokens,
        kv_blocks_received=usage.kv_blocks_received,
        kv_bytes_received=usage.kv_bytes_received,
    )


def _decode_usage(message: pb.WorkUsage) -> WorkUsage:
    return WorkUsage(
        cached_tokens=message.cached_tokens,
        fetched_tokens=message.fetched_tokens,
        computed_tokens=message.computed_tokens,
        kv_blocks_received=message.kv_blocks_received,
        kv_bytes_received=message.kv_bytes_received,
    )


def decode_reason(kind: type[Reason], text: str) -> Reason:
    """One of an enumeration. Raises BadRequest: this revision does not have it."""
    try:
        return kind(text)
    except ValueError:
        raise BadRequest("reason", f"{text!r} is not known here") from None
