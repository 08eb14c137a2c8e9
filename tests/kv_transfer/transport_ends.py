"""One worker's end as the transport tests use it: a pool with a fill pattern, and what its handlers heard."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from core.identity import CacheIdentity
from core.membership import WorkerRef
from kv_transfer.faults import FaultyTransport, TransportFaults
from kv_transfer.nixl import NixlConfig, NixlTransport
from kv_transfer.polling import PollingPeriods
from kv_transfer.pool import MemoryPool, PoolDescription
from kv_transfer.transport import Transport
from tests.kv_transfer.in_process import InProcessNetwork, InProcessTransport

IDENTITY = CacheIdentity(
    schema_revision=1,
    weights_digest="weights",
    tokenizer_digest="tokenizer",
    kv_dtype="float32",
    kv_layout="block-layers-kv-heads",
    block_size=16,
    num_layers=30,
    num_kv_heads=3,
    head_dim=64,
    tensor_parallel_size=1,
    numeric_class="test",
)
BOUND_S = 5.0  # how long a test waits for what must come
# Whatever comes within the bound was rung for: none of these tests sees what a thread finds by itself.
ONLY_WHEN_RUNG = PollingPeriods(idle_s=60.0)


@dataclass
class End:
    transport: Transport
    runs: list[np.ndarray]  # of each rank, [num_blocks, block_bytes / num_runs], uint8
    notices: list[tuple[WorkerRef, bytes]] = field(default_factory=list)
    lost: list[WorkerRef] = field(default_factory=list)
    on_notice: Callable[[bytes], None] = lambda _: None

    @property
    def blocks(self) -> np.ndarray:
        """Of the first rank."""
        return self.runs[0]

    @property
    def ref(self) -> WorkerRef:
        return self.transport.describe().ref

    def listen(self) -> None:
        self.transport.listen(self._hear, self.lost.append)

    def _hear(self, sender: WorkerRef, notice: bytes) -> None:
        self.on_notice(notice)
        self.notices.append((sender, notice))


class Ends:
    """Makes ends of one backend, and closes them. "faulty": inside a FaultyTransport, with `faults` of its own."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.faults = TransportFaults()
        self.network = InProcessNetwork()
        self._made: list[End] = []
        self._num_refs = 0

    def make(
        self, worker_id: str, fill: int = 0, num_blocks: int = 32, block_bytes: int = 4096,
        connect_timeout_s: float = BOUND_S, listens: bool = True, periods: PollingPeriods = ONLY_WHEN_RUNG,
        num_runs: int = 1,
    ) -> End:  # fmt: skip
        runs = [np.full((num_blocks, block_bytes // num_runs), fill, dtype=np.uint8) for _ in range(num_runs)]
        addresses = tuple(run.ctypes.data for run in runs)
        pool = MemoryPool(addresses, num_blocks, block_bytes, device_ids=(0,) * num_runs)
        self._num_refs += 1
        ref = WorkerRef(worker_id, f"{id(self):x}-{self._num_refs}")
        transport: Transport
        if "nixl" in self.backend:
            transport = NixlTransport(ref, IDENTITY, pool, NixlConfig(connect_timeout_s, 0.5, periods=periods))
        else:
            transport = InProcessTransport(self.network, ref, IDENTITY, pool)
        if "faulty" in self.backend:
            transport = FaultyTransport(transport, self.faults)
        end = End(transport, runs)
        if listens:
            end.listen()
        self._made.append(end)
        return end

    async def pair(self) -> tuple[End, End]:
        """A source filled with 1, 2, 3, ... by block and a target filled with 255, connected both ways."""
        source, target = self.make("prefill-0"), self.make("decode-0", fill=255)
        source.blocks[:] = np.arange(1, len(source.blocks) + 1, dtype=np.uint8)[:, None]
        await connect(source, target)
        await connect(target, source)
        return source, target

    async def close(self) -> None:
        for end in self._made:
            await end.transport.close()


async def connect(source: End, target: End, **differences: object) -> None:
    await source.transport.connect(described(target, **differences))


def described(end: End, **differences: object) -> PoolDescription:
    """What it says of itself and of its pool, but for some fields of either."""
    said = end.transport.describe()
    of_pool = {name: differences.pop(name) for name in list(differences) if hasattr(said.pool, name)}
    return replace(said, pool=replace(said.pool, **of_pool), **differences)  # type: ignore[arg-type]


async def until(condition: Callable[[], bool], bound_s: float = BOUND_S) -> None:
    """Wait until `condition` holds; fail the test after `bound_s`."""
    async with asyncio.timeout(bound_s):
        while not condition():  # noqa: ASYNC110, what is awaited comes from threads and other processes
            await asyncio.sleep(0.001)
