"""Where a worker's KV blocks lie, and what every backend checks before a byte moves: that two pools match, and that
block ids lie inside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from core.errors import InvariantBroken, PeerRefused
from core.identity import CacheIdentity
from core.membership import WorkerRef

MEMORY_KINDS: Final = ("DRAM", "VRAM")


@dataclass(frozen=True, slots=True)
class MemoryPool:
    """The memory of a worker's KV blocks, owned by the caller for the transport's life: one contiguous run for each
    rank that computes with the worker. A block has an equal part in each, at the same place."""

    base_addresses: tuple[int, ...]
    num_blocks: int
    block_bytes: int  # of all its parts
    memory_kind: str = "DRAM"  # one of MEMORY_KINDS
    device_ids: tuple[int, ...] = (0,)  # of each run: GPU index; 0 for DRAM

    @property
    def part_bytes(self) -> int:
        """Of a block, in one run."""
        return self.block_bytes // len(self.base_addresses)

    @property
    def run_bytes(self) -> int:
        return self.num_blocks * self.part_bytes


@dataclass(frozen=True, slots=True)
class PoolDescription:
    """What a peer must know to write into a worker's pool. Compared, then connected to."""

    ref: WorkerRef
    identity: CacheIdentity
    transport: str  # backend name: "nixl"
    transport_version: str  # must match exactly: mixed NIXL versions crash each other (docs/adr)
    pool: MemoryPool
    agent_metadata: bytes


def require_compatible(ours: PoolDescription, theirs: PoolDescription) -> None:
    """Raise PeerRefused naming the first field in which two workers may not differ."""
    if ours.ref == theirs.ref:
        raise PeerRefused("ref", ours.ref, theirs.ref)
    for name in ("transport", "transport_version"):
        _require_same(name, getattr(ours, name), getattr(theirs, name))
    ours.identity.require_equal(theirs.identity)
    _require_same("block_bytes", ours.pool.block_bytes, theirs.pool.block_bytes)
    for name in ("base_addresses", "device_ids"):  # the identity has the number of ranks; this must be true to it
        _require_same(name, len(ours.pool.base_addresses), len(getattr(theirs.pool, name)))
    if theirs.pool.memory_kind not in MEMORY_KINDS:
        raise PeerRefused("memory_kind", MEMORY_KINDS, theirs.pool.memory_kind)


def require_blocks(
    source_blocks: Sequence[int], num_source_blocks: int, target_blocks: Sequence[int], num_target_blocks: int
) -> None:
    """Raise InvariantBroken unless the lists pair up and every id lies inside its pool.

    NIXL checks ids only against what the peer claimed of itself, and a write to an unmapped page can crash
    the peer: so this is checked here, for every push.
    """
    if len(source_blocks) != len(target_blocks):
        raise InvariantBroken(f"{len(source_blocks)} source blocks for {len(target_blocks)} target blocks")
    _require_inside("source", source_blocks, num_source_blocks)
    _require_inside("target", target_blocks, num_target_blocks)


def _require_same(field: str, ours: object, theirs: object) -> None:
    if ours != theirs:
        raise PeerRefused(field, ours, theirs)


def _require_inside(side: str, blocks: Sequence[int], num_blocks: int) -> None:
    if blocks and not (min(blocks) >= 0 and max(blocks) < num_blocks):
        outside = next(block for block in blocks if not 0 <= block < num_blocks)
        raise InvariantBroken(f"{side} block {outside} outside the pool of {num_blocks}")
