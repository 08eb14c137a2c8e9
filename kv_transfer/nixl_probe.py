"""What two NIXL workers tell each other beside NIXL's own metadata, and what a probe's outcome says of the path."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Final
from uuid import UUID

from core.errors import PeerRefused
from kv_transfer.nixl_operation import Settled
from kv_transfer.pool import MemoryPool
from kv_transfer.transport import PoolDescription

# What `PeerLink.lane` says: inferred, as NIXL does not tell which transport UCX chose.
LANE_MEMORY: Final = "same-host memory"
LANE_LOOPBACK: Final = "same-host network"
LANE_NETWORK: Final = "network"

# TCP over loopback stays below 6 GB/s where memcpy does 13 (bench/kv_transfer.py); device links are above.
_MEMORY_LANE_GBPS: Final = 8.0

_HEADER: Final = struct.Struct(">4sQQ16s")
_MAGIC: Final = b"TKV1"  # raise the digit when the header or the framing of notices changes


@dataclass(frozen=True, slots=True)
class Envelope:
    """The content of `PoolDescription.agent_metadata`. Peers may write probes to scratch, and nowhere else unasked."""

    scratch_address: int
    scratch_bytes: int
    host: bytes  # 16 bytes, equal for processes under one kernel
    metadata: bytes  # NIXL's own

    def encode(self) -> bytes:
        return _HEADER.pack(_MAGIC, self.scratch_address, self.scratch_bytes, self.host) + self.metadata

    @classmethod
    def decode(cls, data: bytes) -> Envelope:
        """Raises: PeerRefused: not an envelope of this revision."""
        if len(data) < _HEADER.size or not data.startswith(_MAGIC):
            raise PeerRefused("agent_metadata", _MAGIC, data[: len(_MAGIC)])
        _, address, num_bytes, host = _HEADER.unpack_from(data)
        return cls(address, num_bytes, host, data[_HEADER.size :])

    def scratch_of(self, peer: PoolDescription) -> MemoryPool:
        return replace(
            MemoryPool.of(peer), base_address=self.scratch_address, num_blocks=1, block_bytes=self.scratch_bytes
        )


@cache
def this_host() -> bytes:
    """The kernel's boot id: equal in containers of one node, which may still be unable to share memory."""
    return UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes


def infer_lane(same_host: bool, probe: Settled, probe_gbps: float) -> str:
    """Which kind of path a single-descriptor probe took.

    Host memory is copied by the poster itself (CMA), so the probe is over when its post returns: a far clearer
    sign than speed, which on busy cores overlaps with TCP's. Device memory is told by speed alone.
    """
    if not same_host:
        return LANE_NETWORK
    return LANE_MEMORY if probe.in_post or probe_gbps >= _MEMORY_LANE_GBPS else LANE_LOOPBACK
