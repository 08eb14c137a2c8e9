"""What two NIXL workers tell each other beside NIXL's own metadata, and what a probe's outcome says of the path."""

from __future__ import annotations

import statistics
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final
from uuid import UUID

from core.errors import PeerRefused
from kv_transfer.doorbell import BellAddress
from kv_transfer.pool import MemoryPool, PoolDescription

# What `PeerConnected.lane` says: inferred, as NIXL does not tell which transport UCX chose.
LANE_MEMORY: Final = "shared-memory"  # CMA
LANE_GPU_MEMORY: Final = "cuda-ipc"
LANE_LOOPBACK: Final = "tcp-loopback"
LANE_RDMA: Final = "rdma"
LANE_TCP: Final = "tcp"

NUM_PROBES: Final = 5

_HEADER: Final = struct.Struct(">4sQQ16sHB")
_MAGIC: Final = b"TKV2"  # raise the digit when the header or the framing of notices changes


@dataclass(frozen=True, slots=True)
class Probe:
    """One timed write between scratch regions, and what left this host's interfaces meanwhile."""

    seconds: float
    network_bytes: int


@dataclass(frozen=True, slots=True)
class Envelope:
    """The content of `PoolDescription.agent_metadata`. Peers may write probes to scratch, and nowhere else unasked."""

    scratch_address: int
    scratch_bytes: int
    host: bytes  # 16 bytes, equal for processes under one kernel
    bell: BellAddress  # where its transfer thread is woken
    metadata: bytes  # NIXL's own

    def encode(self) -> bytes:
        address, port = self.bell[0].encode(), self.bell[1]
        head = _HEADER.pack(_MAGIC, self.scratch_address, self.scratch_bytes, self.host, port, len(address))
        return head + address + self.metadata

    @classmethod
    def decode(cls, data: bytes) -> Envelope:
        """Raises: PeerRefused: not an envelope of this revision."""
        if len(data) < _HEADER.size or not data.startswith(_MAGIC):
            raise PeerRefused("agent_metadata", _MAGIC, data[: len(_MAGIC)])
        _, address, num_bytes, host, port, bell_length = _HEADER.unpack_from(data)
        metadata_at = _HEADER.size + bell_length
        bell = data[_HEADER.size : metadata_at].decode(errors="replace")
        return cls(address, num_bytes, host, (bell, port), data[metadata_at:])

    def scratch_of(self, peer: PoolDescription) -> MemoryPool:
        pool = peer.pool
        return MemoryPool((self.scratch_address,), 1, self.scratch_bytes, pool.memory_kind, pool.device_ids[:1])


@cache
def this_host() -> bytes:
    """The kernel's boot id: equal in containers of one node, which may still be unable to share memory."""
    return UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes


def network_bytes_sent() -> int:
    """Bytes that left through any network interface of this namespace, loopback included, since boot."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    return sum(int(line.rpartition(":")[2].split()[8]) for line in lines)


def infer_path(same_host: bool, memory_kind: str, num_bytes: int, probes: Sequence[Probe]) -> tuple[str, float]:
    """(lane, GB/s in the median) of several equal probes. memory_kind: as MemoryPool's.

    TCP must pass a network interface of the kernel: where less than a probe's bytes left by one, the bytes went by
    memory, or between hosts by RDMA. Other traffic only adds, so the quietest probe decides. Neither speed nor a post
    that is over at once tells: on busy cores the speeds of CMA and TCP overlap, and TCP is over in the post when both
    sides are busy.
    """
    gbps = num_bytes / statistics.median(probe.seconds for probe in probes) / 1e9
    if min(probe.network_bytes for probe in probes) >= num_bytes // 2:
        return LANE_LOOPBACK if same_host else LANE_TCP, gbps
    if not same_host:
        return LANE_RDMA, gbps
    return LANE_MEMORY if memory_kind == "DRAM" else LANE_GPU_MEMORY, gbps
