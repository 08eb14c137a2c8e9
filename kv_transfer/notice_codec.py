"""Hand-off notices as bytes (proto/tandem/v1/handoff.proto)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from google.protobuf.message import DecodeError
from tandem.v1 import handoff_pb2

from core.handoff import BlocksPushed, HandoffNotice, Landed, NoticeBody, PushPrefix, Quiet, Renew, StopPushing
from core.identity import BlockHash


def encode_notice(notice: HandoffNotice, checksums: Sequence[int] = ()) -> bytes:
    """The notice's wire form; `checksums` of the blocks of a BlocksPushed go beside it."""
    message = handoff_pb2.HandoffNotice(handoff_id=notice.handoff_id, generation=notice.generation, checksums=checksums)
    match notice.body:
        case BlocksPushed() as body:
            pushed = handoff_pb2.BlocksPushed(
                sequence=body.sequence,
                first_block=body.first_block,
                num_blocks=body.num_blocks,
                num_pushes=body.num_pushes,
                first_tokens=body.first_tokens,
            )
            message.pushed.CopyFrom(pushed)
        case Landed():
            message.landed.SetInParent()
        case StopPushing():
            message.stop.SetInParent()
        case Quiet(reason):
            message.quiet.reason = reason
            message.quiet.SetInParent()
        case Renew():
            message.renew.SetInParent()
        case PushPrefix(block_hashes, block_ids):
            message.push_prefix.block_hashes.extend(block_hashes)
            message.push_prefix.block_ids.extend(block_ids)
            message.push_prefix.SetInParent()
        case _:
            assert_never(notice.body)
    payload: bytes = message.SerializeToString()
    return payload


def decode_notice(payload: bytes) -> tuple[HandoffNotice, tuple[int, ...]] | None:
    """The notice and its checksums, or None when the bytes are not one that this revision knows."""
    message = handoff_pb2.HandoffNotice()
    try:
        message.ParseFromString(payload)
    except DecodeError:
        return None
    body = _decode_body(message)
    if body is None:
        return None
    return HandoffNotice(message.handoff_id, message.generation, body), tuple(message.checksums)


def _decode_body(message: handoff_pb2.HandoffNotice) -> NoticeBody | None:
    match message.WhichOneof("notice"):
        case "pushed":
            pushed = message.pushed
            first_tokens = tuple(pushed.first_tokens)
            return BlocksPushed(pushed.sequence, pushed.first_block, pushed.num_blocks, pushed.num_pushes, first_tokens)
        case "landed":
            return Landed()
        case "stop":
            return StopPushing()
        case "quiet":
            return Quiet(message.quiet.reason)
        case "renew":
            return Renew()
        case "push_prefix":
            hashes = tuple(BlockHash(value) for value in message.push_prefix.block_hashes)
            return PushPrefix(hashes, tuple(message.push_prefix.block_ids))
        case _:
            return None
