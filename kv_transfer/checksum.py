"""Checksums of KV blocks in host memory, by which a target knows that what it was pushed arrived whole."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import xxhash

from core.errors import InvariantBroken
from kv_transfer.pool import MemoryPool


class BlockChecksums:
    """XXH3-64 of the blocks of one pool, which must outlive this.

    Reads every byte, at about twice a copy's speed: call it in a thread.
    Raises: InvariantBroken: the pool is in device memory, which the host cannot read.
    """

    def __init__(self, pool: MemoryPool) -> None:
        if pool.memory_kind != "DRAM":
            raise InvariantBroken(f"checksums of a pool in {pool.memory_kind}")
        self._bytes = memoryview((ctypes.c_uint8 * pool.total_bytes).from_address(pool.base_address))
        self._block_bytes = pool.block_bytes

    def of(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """One a block, in order; each in [0, 2**64)."""
        return tuple(xxhash.xxh3_64_intdigest(self._block(block)) for block in blocks)

    def num_intact(self, blocks: Sequence[int], checksums: Sequence[int]) -> int:
        """How many leading blocks have these checksums."""
        for index, (block, checksum) in enumerate(zip(blocks, checksums, strict=False)):
            if xxhash.xxh3_64_intdigest(self._block(block)) != checksum:
                return index
        return min(len(blocks), len(checksums))

    def _block(self, block: int) -> memoryview:
        return self._bytes[block * self._block_bytes : (block + 1) * self._block_bytes]
