"""Commands and answers of the router-worker stream as protobuf (proto/tandem/v1/worker.proto)."""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar, assert_never

from tandem.v1 import logprobs_pb2
from tandem.v1 import worker_pb2 as pb

from core.errors import BadRequest
from core.handoff import HandoffTicket
from core.membership import Role, WorkerInfo, WorkerLoad, WorkerRef
from core.messages import (
    Answer,
    CancelRequest,
    Command,
    PeerConnected,
    PeerDead,
    PeerJoined,
    Refused,
    RefuseReason,
    ReserveBlocks,
    Reserved,
    StartGeneration,
    StartPrefill,
    StepOutput,
)
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

_ROLE_TO_PROTO = {Role.PREFILL: pb.ROLE_PREFILL, Role.DECODE: pb.ROLE_DECODE}
_ROLE_FROM_PROTO = {value: role for role, value in _ROLE_TO_PROTO.items()}

Reason = TypeVar("Reason", bound=StrEnum)


def encode_command(command: Command) -> pb.ConnectRequest:
    """Router to worker."""
    match command:
        case StartGeneration(request):
            return pb.ConnectRequest(start=pb.StartGeneration(request=_encode_request(request)))
        case ReserveBlocks(request, handoff_id, source):
            reserve = pb.ReserveBlocks(
                request=_encode_request(request), handoff_id=handoff_id, source=encode_ref(source)
            )
            return pb.ConnectRequest(reserve=reserve)
        case StartPrefill(request, ticket):
            prefill = pb.StartPrefill(request=_encode_request(request), ticket=_encode_ticket(ticket))
            return pb.ConnectRequest(prefill=prefill)
        case CancelRequest(request_id):
            return pb.ConnectRequest(cancel=pb.CancelRequest(request_id=request_id))
        case PeerJoined(worker):
            return pb.ConnectRequest(peer_joined=pb.PeerJoined(worker=encode_info(worker)))
        case PeerDead(worker):
            return pb.ConnectRequest(peer_dead=pb.PeerDead(worker=encode_ref(worker)))
        case _:
            assert_never(command)


def decode_command(message: pb.ConnectRequest) -> Command:
    """Raises BadRequest: a kind that this revision does not know, or a field out of range."""
    match message.WhichOneof("message"):
        case "start":
            return StartGeneration(_decode_request(message.start.request))
        case "reserve":
            reserve = message.reserve
            return ReserveBlocks(_decode_request(reserve.request), reserve.handoff_id, decode_ref(reserve.source))
        case "prefill":
            return StartPrefill(_decode_request(message.prefill.request), _decode_ticket(message.prefill.ticket))
        case "cancel":
            return CancelRequest(message.cancel.request_id)
        case "peer_joined":
            return PeerJoined(decode_info(message.peer_joined.worker))
        case "peer_dead":
            return PeerDead(decode_ref(message.peer_dead.worker))
        case kind:
            raise BadRequest("message", f"command {kind} is not known to this worker")


def encode_answer(answer: Answer) -> pb.ConnectResponse:
    """Worker to router."""
    match answer:
        case StepOutput(deltas, load):
            step = pb.StepOutput(deltas=[_encode_delta(delta) for delta in deltas], load=encode_load(load))
            return pb.ConnectResponse(step=step)
        case Reserved(request_id, ticket):
            return pb.ConnectResponse(reserved=pb.Reserved(request_id=request_id, ticket=_encode_ticket(ticket)))
        case Refused(request_id, reason, text):
            return pb.ConnectResponse(refused=pb.Refused(request_id=request_id, reason=reason, message=text))
        case PeerConnected(peer, lane, probe_gbps):
            connected = pb.PeerConnected(peer=encode_ref(peer), lane=lane, probe_gbps=probe_gbps)
            return pb.ConnectResponse(peer_connected=connected)
        case _:
            assert_never(answer)


def decode_answer(message: pb.ConnectResponse) -> Answer:
    """Raises BadRequest: a kind or a reason that this revision does not know."""
    match message.WhichOneof("message"):
        case "step":
            deltas = tuple(_decode_delta(delta) for delta in message.step.deltas)
            return StepOutput(deltas, decode_load(message.step.load))
        case "reserved":
            return Reserved(message.reserved.request_id, _decode_ticket(message.reserved.ticket))
        case "refused":
            refused = message.refused
            return Refused(refused.request_id, _reason(RefuseReason, refused.reason), refused.message)
        case "peer_connected":
            connected = message.peer_connected
            return PeerConnected(decode_ref(connected.peer), connected.lane, connected.probe_gbps)
        case kind:
            raise BadRequest("message", f"answer {kind} is not known to this router")


def encode_ref(ref: WorkerRef) -> pb.WorkerRef:
    return pb.WorkerRef(worker_id=ref.worker_id, incarnation=ref.incarnation)


def decode_ref(message: pb.WorkerRef) -> WorkerRef:
    return WorkerRef(message.worker_id, message.incarnation)


def encode_info(info: WorkerInfo) -> pb.WorkerInfo:
    return pb.WorkerInfo(
        ref=encode_ref(info.ref),
        role=_ROLE_TO_PROTO[info.role],
        address=info.address,
        identity_digest=info.identity_digest,
        block_size=info.block_size,
        block_bytes=info.block_bytes,
        num_blocks=info.num_blocks,
        max_context_tokens=info.max_context_tokens,
        metrics_address=info.metrics_address,
    )


def decode_info(message: pb.WorkerInfo) -> WorkerInfo:
    """Raises BadRequest: the role is not one we know."""
    if message.role not in _ROLE_FROM_PROTO:
        raise BadRequest("worker.role", f"must be prefill or decode, got {message.role}")
    return WorkerInfo(
        ref=decode_ref(message.ref),
        role=_ROLE_FROM_PROTO[message.role],
        address=message.address,
        identity_digest=message.identity_digest,
        block_size=message.block_size,
        block_bytes=message.block_bytes,
        num_blocks=message.num_blocks,
        max_context_tokens=message.max_context_tokens,
        metrics_address=message.metrics_address,
    )


def encode_load(load: WorkerLoad) -> pb.WorkerLoad:
    return pb.WorkerLoad(
        waiting_requests=load.waiting_requests,
        running_requests=load.running_requests,
        waiting_tokens=load.waiting_tokens,
        free_blocks=load.free_blocks,
        used_blocks=load.used_blocks,
        quarantined_blocks=load.quarantined_blocks,
    )


def decode_load(message: pb.WorkerLoad) -> WorkerLoad:
    return WorkerLoad(
        waiting_requests=message.waiting_requests,
        running_requests=message.running_requests,
        waiting_tokens=message.waiting_tokens,
        free_blocks=message.free_blocks,
        used_blocks=message.used_blocks,
        quarantined_blocks=message.quarantined_blocks,
    )


def _encode_request(request: GenerateRequest) -> pb.WorkerRequest:
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
    )


def _decode_request(message: pb.WorkerRequest) -> GenerateRequest:
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
    )


def _encode_grammar(grammar: Grammar | None) -> pb.Grammar | None:
    return pb.Grammar(kind=grammar.kind, source=grammar.source) if grammar is not None else None


def _decode_grammar(message: pb.Grammar) -> Grammar:
    return Grammar(_reason(GrammarKind, message.kind), message.source)


def _encode_ticket(ticket: HandoffTicket) -> pb.HandoffTicket:
    return pb.HandoffTicket(
        handoff_id=ticket.handoff_id,
        target=encode_ref(ticket.target),
        generation=ticket.generation,
        first_block=ticket.first_block,
        block_ids=ticket.block_ids,
    )


def _decode_ticket(message: pb.HandoffTicket) -> HandoffTicket:
    return HandoffTicket(
        handoff_id=message.handoff_id,
        target=decode_ref(message.target),
        generation=message.generation,
        first_block=message.first_block,
        block_ids=tuple(message.block_ids),
    )


def _encode_delta(delta: TokenDelta) -> pb.TokenDelta:
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


def _decode_delta(message: pb.TokenDelta) -> TokenDelta:
    return TokenDelta(
        request_id=message.request_id,
        position=message.position,
        token_ids=tuple(message.token_ids),
        finish_reason=_reason(FinishReason, message.finish_reason) if message.finish_reason else None,
        matched_stop=message.matched_stop or None,
        message=message.message,
        usage=_decode_usage(message.usage) if message.HasField("usage") else None,
        logprobs=tuple(_decode_logprobs(item) for item in message.logprobs),
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


def _reason(kind: type[Reason], text: str) -> Reason:
    try:
        return kind(text)
    except ValueError:
        raise BadRequest("reason", f"{text!r} is not known here") from None
