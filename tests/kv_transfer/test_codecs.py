"""What goes over the wire comes out whole, or is refused."""

from __future__ import annotations

from dataclasses import fields

import pytest
from tandem.v1 import worker_pb2 as pb

from core.errors import BadRequest
from core.identity import CacheIdentity
from core.membership import WorkerRef
from kv_transfer.pool_codec import decode_pool, encode_pool
from kv_transfer.stream_codec import decode_answer
from kv_transfer.transport import PoolDescription

DESCRIPTION = PoolDescription(
    ref=WorkerRef("decode-0", "9f3a2c1d"),
    identity=CacheIdentity(1, "weights", "tokenizer", "float32", "layout", 16, 30, 3, 64, 2, "cpu-avx2"),
    transport="nixl",
    transport_version="1.5.1",
    base_address=0x7FFF_FFFF_F000,
    block_bytes=720 << 10,
    num_blocks=4096,
    device_id=3,
    memory_kind="VRAM",
    agent_metadata=bytes(range(256)),
)


def test_round_trip_through_bytes() -> None:
    sent = encode_pool(DESCRIPTION).SerializeToString()
    assert decode_pool(pb.PeerDescription.FromString(sent)) == DESCRIPTION


def test_every_field_is_on_the_wire() -> None:
    def names(message: type) -> set[str]:
        return {field.name for field in message.DESCRIPTOR.fields}  # type: ignore[attr-defined]

    assert names(pb.PeerDescription) == {item.name for item in fields(PoolDescription)}
    assert names(pb.CacheIdentity) == {item.name for item in fields(CacheIdentity)}


def test_a_reason_of_a_later_revision_is_refused() -> None:
    answer = pb.ConnectResponse(refused=pb.Refused(request_id="r1", reason="on_fire"))
    with pytest.raises(BadRequest, match="on_fire"):
        decode_answer(answer)
