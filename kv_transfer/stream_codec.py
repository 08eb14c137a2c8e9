"""Commands and answers of the router-worker stream as protobuf (proto/tandem/v1/worker.proto)."""

from __future__ import annotations

from dataclasses import asdict
from typing import assert_never

from tandem.v1 import worker_pb2 as pb

from core.errors import BadRequest
from core.handoff import HandoffTicket
from core.identity import KEY_BYTES
from core.messages import (
    Answer,
    CacheEvents,
    CancelRequest,
    Command,
    Draining,
    PeerConnected,
    PeerDead,
    PeerJoined,
    Refused,
    RefuseReason,
    ReserveBlocks,
    Reserved,
    ResyncCache,
    Serving,
    StartGeneration,
    StartPrefill,
    StepOutput,
    Turn,
)
from kv_transfer.membership_codec import (
    decode_info,
    decode_load,
    decode_ref,
    decode_role,
    decode_work,
    encode_info,
    encode_load,
    encode_ref,
    encode_role,
    encode_work,
)
from kv_transfer.request_codec import decode_delta, decode_reason, decode_request, encode_delta, encode_request


def encode_command(command: Command) -> pb.ConnectRequest:
    """Router to worker."""
    match command:
        case StartGeneration(request):
            return pb.ConnectRequest(start=pb.StartGeneration(request=encode_request(request)))
        case ReserveBlocks(request, handoff_id, source):
            reserve = pb.ReserveBlocks(
                request=encode_request(request), handoff_id=handoff_id, source=encode_ref(source)
            )
            return pb.ConnectRequest(reserve=reserve)
        case StartPrefill(request, ticket):
            prefill = pb.StartPrefill(request=encode_request(request), ticket=_encode_ticket(ticket))
            return pb.ConnectRequest(prefill=prefill)
        case CancelRequest(request_id):
            return pb.ConnectRequest(cancel=pb.CancelRequest(request_id=request_id))
        case PeerJoined(worker):
            return pb.ConnectRequest(peer_joined=pb.PeerJoined(worker=encode_info(worker)))
        case PeerDead(worker):
            return pb.ConnectRequest(peer_dead=pb.PeerDead(worker=encode_ref(worker)))
        case ResyncCache():
            return pb.ConnectRequest(resync_cache=pb.ResyncCache())
        case _:
            assert_never(command)


def decode_command(message: pb.ConnectRequest) -> Command:
    """Raises BadRequest: a kind that this revision does not know, or a field out of range."""
    match message.WhichOneof("message"):
        case "start":
            return StartGeneration(decode_request(message.start.request))
        case "reserve":
            reserve = message.reserve
            return ReserveBlocks(decode_request(reserve.request), reserve.handoff_id, decode_ref(reserve.source))
        case "prefill":
            return StartPrefill(decode_request(message.prefill.request), _decode_ticket(message.prefill.ticket))
        case "cancel":
            return CancelRequest(message.cancel.request_id)
        case "peer_joined":
            return PeerJoined(decode_info(message.peer_joined.worker))
        case "peer_dead":
            return PeerDead(decode_ref(message.peer_dead.worker))
        case "resync_cache":
            return ResyncCache()
        case kind:
            raise BadRequest("message", f"command {kind} is not known to this worker")


def encode_answer(answer: Answer) -> pb.ConnectResponse:
    """Worker to router."""
    match answer:
        case StepOutput(deltas, load, others, cache, turns, computing, in_line):
            step = pb.StepOutput(
                deltas=[encode_delta(delta) for delta in deltas],
                load=encode_load(load),
                others=encode_work(others),
                cache=None if cache is None else _encode_cache(cache),
                turns=[pb.Turn(**asdict(turn)) for turn in turns],
                computing=None if computing is None else pb.Prompts(request_ids=computing),
                in_line=in_line,
            )
            return pb.ConnectResponse(step=step)
        case Reserved(request_id, ticket):
            return pb.ConnectResponse(reserved=pb.Reserved(request_id=request_id, ticket=_encode_ticket(ticket)))
        case Refused(request_id, reason, text):
            return pb.ConnectResponse(refused=pb.Refused(request_id=request_id, reason=reason, message=text))
        case PeerConnected(peer, lane, probe_gbps):
            connected = pb.PeerConnected(peer=encode_ref(peer), lane=lane, probe_gbps=probe_gbps)
            return pb.ConnectResponse(peer_connected=connected)
        case Draining(finish_s, unbegun):
            return pb.ConnectResponse(draining=pb.Draining(finish_s=finish_s, unbegun_request_ids=unbegun))
        case Serving(role):
            return pb.ConnectResponse(serving=pb.Serving(role=encode_role(role)))
        case _:
            assert_never(answer)


def decode_answer(message: pb.ConnectResponse) -> Answer:
    """Raises BadRequest: a kind, a reason or a role that this revision does not know, or half a key."""
    match message.WhichOneof("message"):
        case "step":
            step = message.step
            deltas = tuple(decode_delta(delta) for delta in step.deltas)
            cache = _decode_cache(step.cache) if step.HasField("cache") else None
            turns = tuple(Turn(it.tenant, it.batch, it.num_choices, it.prompt_tokens) for it in step.turns)
            computing = frozenset(step.computing.request_ids) if step.HasField("computing") else None
            load, others = decode_load(step.load), decode_work(step.others)
            return StepOutput(deltas, load, others, cache, turns, computing, tuple(step.in_line))
        case "reserved":
            return Reserved(message.reserved.request_id, _decode_ticket(message.reserved.ticket))
        case "refused":
            refused = message.refused
            return Refused(refused.request_id, decode_reason(RefuseReason, refused.reason), refused.message)
        case "peer_connected":
            connected = message.peer_connected
            return PeerConnected(decode_ref(connected.peer), connected.lane, connected.probe_gbps)
        case "draining":
            return Draining(message.draining.finish_s, tuple(message.draining.unbegun_request_ids))
        case "serving":
            return Serving(decode_role(message.serving.role))
        case kind:
            raise BadRequest("message", f"answer {kind} is not known to this router")


def _encode_cache(events: CacheEvents) -> pb.CacheEvents:
    return pb.CacheEvents(
        sequence=events.sequence,
        stored=events.stored,
        evicted=events.evicted,
        reset=events.reset,
        host=events.host,
        disk=events.disk,
    )


def _decode_cache(message: pb.CacheEvents) -> CacheEvents:
    for field in ("stored", "evicted", "host", "disk"):
        if len(getattr(message, field)) % KEY_BYTES:
            raise BadRequest(f"cache.{field}", f"must hold whole keys of {KEY_BYTES} bytes")
    return CacheEvents(message.sequence, message.stored, message.evicted, message.reset, message.host, message.disk)


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
