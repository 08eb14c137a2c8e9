"""A pool's description as protobuf (proto/tandem/v1/worker.proto), for the handshake of two workers."""

from __future__ import annotations

from dataclasses import asdict

from tandem.v1 import worker_pb2 as pb

from core.identity import CacheIdentity
from kv_transfer.membership_codec import decode_ref, encode_ref
from kv_transfer.transport import PoolDescription


def encode_pool(description: PoolDescription) -> pb.PeerDescription:
    return pb.PeerDescription(
        ref=encode_ref(description.ref),
        identity=pb.CacheIdentity(**asdict(description.identity)),
        transport=description.transport,
        transport_version=description.transport_version,
        base_addresses=description.base_addresses,
        block_bytes=description.block_bytes,
        num_blocks=description.num_blocks,
        device_ids=description.device_ids,
        memory_kind=description.memory_kind,
        agent_metadata=description.agent_metadata,
    )


def decode_pool(message: pb.PeerDescription) -> PoolDescription:
    """As the peer said it; whether it fits ours is checked when connecting (`kv_transfer.pool`)."""
    return PoolDescription(
        ref=decode_ref(message.ref),
        identity=_decode_identity(message.identity),
        transport=message.transport,
        transport_version=message.transport_version,
        base_addresses=tuple(message.base_addresses),
        block_bytes=message.block_bytes,
        num_blocks=message.num_blocks,
        device_ids=tuple(message.device_ids),
        memory_kind=message.memory_kind,
        agent_metadata=message.agent_metadata,
    )


def _decode_identity(message: pb.CacheIdentity) -> CacheIdentity:
    return CacheIdentity(
        schema_revision=message.schema_revision,
        weights_digest=message.weights_digest,
        tokenizer_digest=message.tokenizer_digest,
        kv_dtype=message.kv_dtype,
        kv_layout=message.kv_layout,
        block_size=message.block_size,
        num_layers=message.num_layers,
        num_kv_heads=message.num_kv_heads,
        head_dim=message.head_dim,
        tensor_parallel_size=message.tensor_parallel_size,
        numeric_class=message.numeric_class,
    )
