"""The gRPC front: tandem.v1.InferenceService, grpc.health.v1 and reflection on one server."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Final, NoReturn

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from tandem.v1 import inference_pb2, inference_pb2_grpc

from core.errors import BadRequest, TandemError
from core.request import Grammar, Placement
from kv_transfer.request_codec import encode_logprobs, encode_prompt_logprobs
from router.front.caller import AUTHORIZATION, SLO_TTFT, TRACEPARENT, Caller, only
from router.front.constraint import (
    ANY_OBJECT,
    choice_grammar,
    context_free_grammar,
    json_schema_grammar,
    json_text_grammar,
    regex_grammar,
)
from router.front.errors import edge_error, renamed
from router.front.generation import Front, TextDelta
from router.front.intake import ChatMessage, Draft, Prompt
from router.front.meter import Endpoint
from router.front.readiness import Readiness, ReadinessHealth

logger = logging.getLogger(__name__)

SERVICE_NAME: Final = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
MAX_MESSAGE_BYTES: Final = 16 << 20
MAX_ERROR_BYTES: Final = 1000  # sent twice, spelled with up to three bytes each, in trailers that may have 8 KiB
# Gateways ping every 30 s even when idle; the core's defaults would answer with GOAWAY too_many_pings
# (vllm#55102). `min_recv_ping_interval...` is silently ignored: this is the name that works.
SERVER_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # two routers on one port would split the clients silently
)

# How this front's callers spell the intake's fields.
_FIELD_NAMES: Final[Mapping[str, str]] = {
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "top_k": "sampling.top_k",
    "seed": "sampling.seed",
    "min_p": "sampling.min_p",
    "repetition_penalty": "sampling.repetition_penalty",
    "presence_penalty": "sampling.presence_penalty",
    "frequency_penalty": "sampling.frequency_penalty",
    "logit_bias": "sampling.logit_bias",
    "top_logprobs": "sampling.top_logprobs",
    "max_tokens": "stopping.max_tokens",
    "min_tokens": "stopping.min_tokens",
    "stop": "stopping.stop",
    "stop_token_ids": "stopping.stop_token_ids",
}
_PROMPT_NAMES: Final[Mapping[str, str]] = {"text": "text", "token_ids": "token_ids.ids", "chat": "chat.messages"}
_PLACEMENTS: Final[Mapping[int, Placement]] = {
    inference_pb2.PREFILL_PLACEMENT_UNSPECIFIED: Placement.AUTO,
    inference_pb2.PREFILL_PLACEMENT_REMOTE: Placement.REMOTE,
    inference_pb2.PREFILL_PLACEMENT_LOCAL: Placement.LOCAL,
}


@dataclass(frozen=True, slots=True)
class GrpcFront:
    """A server that is built, not started: add services and ports to `server`, then start it.

    Run `health.follow()` beside it; call `health.enter_graceful_shutdown()` before stopping it.
    """

    server: grpc.aio.Server
    health: ReadinessHealth


def build_grpc_server(front: Front, readiness: Readiness) -> GrpcFront:
    """The server with InferenceService, health and reflection."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((_inference_handler(InferenceServicer(front)),))
    health_servicer = ReadinessHealth(readiness, (SERVICE_NAME,))
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    return GrpcFront(server, health_servicer)


def _inference_handler(servicer: InferenceServicer) -> grpc.GenericRpcHandler:
    """What add_InferenceServiceServicer_to_server does, with a parser of our own for Generate: grpc would answer
    UNKNOWN, and log a traceback, to each message that is not protobuf."""
    handlers = {
        "Generate": grpc.unary_stream_rpc_method_handler(
            servicer.Generate, _request_or_none, inference_pb2.GenerateResponse.SerializeToString
        ),
        "GetModelInfo": grpc.unary_unary_rpc_method_handler(
            servicer.GetModelInfo,
            inference_pb2.GetModelInfoRequest.FromString,
            inference_pb2.GetModelInfoResponse.SerializeToString,
        ),
    }
    return grpc.method_handlers_generic_handler(SERVICE_NAME, handlers)


def _request_or_none(raw: bytes) -> inference_pb2.GenerateRequest | None:
    try:
        request: inference_pb2.GenerateRequest = inference_pb2.GenerateRequest.FromString(raw)
    except DecodeError:
        return None
    return request


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """tandem.v1.InferenceService over one Front."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def Generate(
        self, request: inference_pb2.GenerateRequest | None, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Stream one generation; `request` is None when its bytes are not a GenerateRequest.

        An async generator, not context.write: tracing interceptors break the other form.
        """
        if request is None:
            await _abort(context, BadRequest("body", "is not a tandem.v1.GenerateRequest, or not UTF-8"))
        request_id = request.request_id or self._front.new_request_id()
        try:
            with self._front.meter(Endpoint.GRPC, request_id, _values(context, TRACEPARENT)) as meter:
                caller = self._caller(context)
                placement, draft = _draft(request, request_id, self._front.model.name)
                prepared = await self._front.prepare(draft, caller)
                generated = self._front.generate(prepared, placement, meter, caller.max_ttft_s)
                async with aclosing(generated) as deltas:
                    async for delta in deltas:
                        yield _response(request_id, delta)
        except BadRequest as error:
            await _abort(context, renamed(error, _names_for(request)))
        except Exception as error:
            await _abort(context, error)

    async def GetModelInfo(
        self, _request: inference_pb2.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.GetModelInfoResponse:
        try:
            self._caller(context)
        except TandemError as error:
            await _abort(context, error)
        model = self._front.model
        return inference_pb2.GetModelInfoResponse(
            model=model.name,
            max_context_tokens=model.max_context_tokens,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            adapters=model.adapters,
        )

    def _caller(self, context: grpc.aio.ServicerContext) -> Caller:
        key, patience = (only(name, _values(context, name)) for name in (AUTHORIZATION, SLO_TTFT))
        return self._front.caller(key, patience)


def _values(context: grpc.aio.ServicerContext, name: str) -> list[str]:
    return [str(value) for found, value in context.invocation_metadata() or () if found == name]


async def _abort(context: grpc.aio.ServicerContext, error: Exception) -> NoReturn:
    seen = edge_error(error)
    if seen.grpc_status is grpc.StatusCode.INTERNAL:
        logger.error("request failed", exc_info=error)
    seen = replace(seen, message=_short(seen.message))
    await context.abort(seen.grpc_status, seen.message, seen.grpc_trailers)
    raise AssertionError("abort raises")


def _short(message: str) -> str:
    """It may quote its caller, who may have written megabytes, and name all adapters."""
    text = message.encode(errors="replace")
    return message if len(text) <= MAX_ERROR_BYTES else text[:MAX_ERROR_BYTES].decode(errors="ignore") + " ..."


def _draft(request: inference_pb2.GenerateRequest, request_id: str, served_name: str) -> tuple[Placement, Draft]:
    """The request as the intake takes it. Unset optional fields are None, as everywhere."""
    placement = _PLACEMENTS.get(request.prefill_placement)
    if placement is None:
        raise BadRequest("prefill_placement", f"{request.prefill_placement} is not a known placement")
    sampling, stopping = request.sampling, request.stopping
    draft = Draft(
        prompt=_prompt(request),
        model=request.model or served_name,
        request_id=request_id,
        temperature=sampling.temperature if sampling.HasField("temperature") else None,
        top_p=sampling.top_p if sampling.HasField("top_p") else None,
        top_k=sampling.top_k,
        seed=sampling.seed if sampling.HasField("seed") else None,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty if sampling.HasField("repetition_penalty") else None,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=sampling.logit_bias,
        top_logprobs=sampling.top_logprobs if sampling.HasField("top_logprobs") else None,
        max_tokens=stopping.max_tokens if stopping.HasField("max_tokens") else None,
        min_tokens=stopping.min_tokens,
        stop_strings=tuple(stopping.stop),
        stop_token_ids=tuple(stopping.stop_token_ids),
        ignore_eos=stopping.ignore_eos,
        cache_salt=request.cache_salt,
        priority=request.priority,
        num_choices=request.n or 1,
        grammar=_grammar(request.constraint) if request.HasField("constraint") else None,
        prompt_logprobs=request.prompt_logprobs if request.HasField("prompt_logprobs") else None,
        session_id=request.session_id,
    )
    return placement, draft


def _grammar(constraint: inference_pb2.Constraint) -> Grammar:
    match constraint.WhichOneof("kind"):
        case "json_schema":
            return json_text_grammar(constraint.json_schema)
        case "json_object" if constraint.json_object:
            return json_schema_grammar(ANY_OBJECT)
        case "regex":
            return regex_grammar(constraint.regex)
        case "choice":
            return choice_grammar(constraint.choice.choices)
        case "grammar":
            return context_free_grammar(constraint.grammar)
        case _:
            raise BadRequest("grammar", "one of json_schema, json_object, regex, choice and grammar is required")


def _prompt(request: inference_pb2.GenerateRequest) -> Prompt:
    match request.WhichOneof("input"):
        case "text":
            return request.text
        case "token_ids":
            return tuple(request.token_ids.ids)
        case "chat":
            return tuple(ChatMessage(message.role, message.content) for message in request.chat.messages)
        case _:
            raise BadRequest("input", "one of text, token_ids and chat is required")


def _names_for(request: inference_pb2.GenerateRequest) -> Mapping[str, str]:
    """Field names, with prompt and grammar under the kinds that the caller chose."""
    kind = request.constraint.WhichOneof("kind")
    return {
        **_FIELD_NAMES,
        "prompt": _PROMPT_NAMES.get(request.WhichOneof("input") or "", "input"),
        "grammar": f"constraint.{kind}" if kind else "constraint",
    }


def _response(request_id: str, delta: TextDelta) -> inference_pb2.GenerateResponse:
    response = inference_pb2.GenerateResponse(
        request_id=request_id,
        token_ids=delta.token_ids,
        text=delta.text,
        logprobs=[encode_logprobs(item) for item in delta.logprobs],
        prompt_logprobs=encode_prompt_logprobs(delta.prompt_logprobs),
        finish_reason=delta.finish_reason or "",
        matched_stop=delta.matched_stop or "",
        choice=delta.choice,
    )
    if delta.last:
        usage = delta.usage
        response.usage.CopyFrom(
            inference_pb2.Usage(
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                cached_tokens=usage.cached_tokens,
                kv_blocks_moved=usage.kv_blocks_moved,
                kv_bytes_moved=usage.kv_bytes_moved,
            )
        )
    return response
