"""Block arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

MIN_FETCHED_BLOCKS: Final = 4  # of a prefix: of fewer, a prefill worker computes the tokens itself


class CacheTier(StrEnum):
    """Where a worker has a cached block: in its KV pool, or below it. Metric label."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens; the last may be partial."""
    return -(-num_tokens // block_size)


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """The shape of one KV block: `block_size` tokens of all layers, keys and values, in one contiguous run.

    Layers are outermost, then keys and values; the order inside is the engine's (`kv_layout` of the cache identity).
    """

    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int

    @property
    def block_bytes(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.block_size * self.head_dim * self.dtype_bytes
