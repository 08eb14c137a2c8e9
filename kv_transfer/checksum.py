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
        self._runs = [
            memoryview((ctypes.c_uint8 * pool.run_bytes).from_address(address)) for address in pool.base_addresses
        ]
        self._part_bytes = pool.part_bytes

    def of(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """One a block, in order; each in [0, 2**64)."""
        return tuple(self._digest(block) for block in blocks)

    def num_intact(self, blocks: Sequence[int], checksums: Sequence[int]) -> int:
        """How many leading blocks have these checksums."""
        for index, (block, checksum) in enumerate(zip(blocks, checksums, strict=False)):
            if self._digest(block) != checksum:
                return index
        return min(len(blocks), len(checksums))

    def _digest(self, block: int) -> int:
        """Of its parts, one after the other."""
        digest = xxhash.xxh3_64()
        for run in self._runs:
            digest.update(run[block * self._part_bytes : (block + 1) * self._part_bytes])
        return digest.intdigest()
