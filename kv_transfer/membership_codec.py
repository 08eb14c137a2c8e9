"""Workers, as protobuf (proto/tandem/v1/worker.proto)."""

from __future__ import annotations

from dataclasses import asdict
from operator import attrgetter

from tandem.v1 import worker_pb2 as pb

from core.errors import BadRequest
from core.identity import Adapter
from core.membership import GivenWork, Role, WorkerInfo, WorkerLoad, WorkerRef

_ROLE_TO_PROTO = {Role.PREFILL: pb.ROLE_PREFILL, Role.DECODE: pb.ROLE_DECODE}
_ROLE_FROM_PROTO = {value: role for role, value in _ROLE_TO_PROTO.items()}


def encode_ref(ref: WorkerRef) -> pb.WorkerRef:
    return pb.WorkerRef(worker_id=ref.worker_id, incarnation=ref.incarnation)


def decode_ref(message: pb.WorkerRef) -> WorkerRef:
    return WorkerRef(message.worker_id, message.incarnation)


def encode_adapter(adapter: Adapter) -> pb.Adapter:
    return pb.Adapter(name=adapter.name, digest=adapter.digest)


def decode_adapter(message: pb.Adapter) -> Adapter:
    return Adapter(message.name, message.digest)


def encode_role(role: Role) -> pb.Role:
    return _ROLE_TO_PROTO[role]


def decode_role(role: pb.Role) -> Role:
    """Raises BadRequest: it is not one we know."""
    if role not in _ROLE_FROM_PROTO:
        raise BadRequest("role", f"must be prefill or decode, got {role}")
    return _ROLE_FROM_PROTO[role]


def encode_info(info: WorkerInfo) -> pb.WorkerInfo:
    return pb.WorkerInfo(
        ref=encode_ref(info.ref),
        role=encode_role(info.role),
        address=info.address,
        identity_digest=info.identity_digest,
        block_size=info.block_size,
        block_bytes=info.block_bytes,
        num_blocks=info.num_blocks,
        max_context_tokens=info.max_context_tokens,
        metrics_address=info.metrics_address,
        nvlink_domain=info.nvlink_domain,
        adapters=[encode_adapter(adapter) for adapter in sorted(info.adapters, key=attrgetter("name"))],
        num_tier_blocks=info.num_tier_blocks,
    )


def decode_info(message: pb.WorkerInfo) -> WorkerInfo:
    """Raises BadRequest: the role is not one we know."""
    return WorkerInfo(
        ref=decode_ref(message.ref),
        role=decode_role(message.role),
        address=message.address,
        identity_digest=message.identity_digest,
        block_size=message.block_size,
        block_bytes=message.block_bytes,
        num_blocks=message.num_blocks,
        max_context_tokens=message.max_context_tokens,
        metrics_address=message.metrics_address,
        nvlink_domain=message.nvlink_domain,
        adapters=frozenset(map(decode_adapter, message.adapters)),
        num_tier_blocks=message.num_tier_blocks,
    )


def encode_load(load: WorkerLoad) -> pb.WorkerLoad:
    return pb.WorkerLoad(**asdict(load))


def decode_load(message: pb.WorkerLoad) -> WorkerLoad:
    return WorkerLoad(
        waiting_requests=message.waiting_requests,
        running_requests=message.running_requests,
        waiting_tokens=message.waiting_tokens,
        free_blocks=message.free_blocks,
        used_blocks=message.used_blocks,
        quarantined_blocks=message.quarantined_blocks,
    )


def encode_work(work: GivenWork) -> pb.GivenWork:
    return pb.GivenWork(**asdict(work))


def decode_work(message: pb.GivenWork) -> GivenWork:
    return GivenWork(message.num_requests, message.num_tokens, message.prompt_tokens, message.unplaced_tokens)
