"""A pool's description as protobuf (proto/tandem/v1/worker.proto), for the handshake of two workers."""

from __future__ import annotations

from dataclasses import asdict, fields

from tandem.v1 import worker_pb2 as pb

from core.identity import CacheIdentity
from kv_transfer.membership_codec import decode_ref, encode_ref
from kv_transfer.pool import MemoryPool, PoolDescription


def encode_pool(description: PoolDescription) -> pb.PeerDescription:
    return pb.PeerDescription(
        ref=encode_ref(description.ref),
        identity=pb.CacheIdentity(**asdict(description.identity)),
        transport=description.transport,
        transport_version=description.transport_version,
        agent_metadata=description.agent_metadata,
        **asdict(description.pool),
    )


def decode_pool(message: pb.PeerDescription) -> PoolDescription:
    """As the peer said it; whether it fits ours is checked when connecting (`kv_transfer.pool`)."""
    return PoolDescription(
        ref=decode_ref(message.ref),
        identity=CacheIdentity(**{item.name: getattr(message.identity, item.name) for item in fields(CacheIdentity)}),
        transport=message.transport,
        transport_version=message.transport_version,
        pool=MemoryPool(
            base_addresses=tuple(message.base_addresses),
            num_blocks=message.num_blocks,
            block_bytes=message.block_bytes,
            memory_kind=message.memory_kind,
            device_ids=tuple(message.device_ids),
        ),
        agent_metadata=message.agent_metadata,
    )
