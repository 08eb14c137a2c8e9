"""KV transfer by NIXL: UCX over CUDA IPC, RDMA, cross-memory attach (CMA) or TCP, whichever UCX finds.

One agent and one owner thread per worker; asyncio gets futures. Push only (WRITE): a READ over TCP can abort the
process that is read from. What NIXL lacks and this adds: version and identity checks, bounds checks, a connect bound,
and handles that are kept until they settle. What it cannot add: a push to a frozen peer stays in flight until the peer
thaws or dies, or UCX_TCP_USER_TIMEOUT ends its connection; sessions own deadlines and quarantine.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from core.errors import InvariantBroken, TransferFailed, WorkerLost
from core.identity import CacheIdentity
from core.membership import WorkerRef
from core.messages import PeerConnected
from kv_transfer.doorbell import Doorbell
from kv_transfer.nixl_engine import NixlEngine
from kv_transfer.nixl_library import TRANSPORT_VERSION, block_indices, load_nixl
from kv_transfer.nixl_operation import Completion
from kv_transfer.nixl_probe import LANE_LOOPBACK, NUM_PROBES, Envelope, Probe, infer_path, network_bytes_sent, this_host
from kv_transfer.nixl_thread import NixlThread
from kv_transfer.polling import PollingPeriods
from kv_transfer.pool import MemoryPool, PoolDescription, require_blocks, require_compatible
from kv_transfer.transport import LostHandler, NoticeHandler, TransportStats
from telemetry.logs import log_state

logger = logging.getLogger(__name__)

TRANSPORT_NAME: Final = "nixl"

_WARM_BYTES: Final = 64


@dataclass(frozen=True, slots=True)
class NixlConfig:
    """Bounds and periods of one transport."""

    connect_timeout_s: float = 5.0  # from first byte to warm; covers a peer whose thread is busy copying
    drop_timeout_s: float = 2.0  # how long `drop` waits for what is in flight
    interface: str | None = None  # network interfaces for UCX, "lo" or "eth0,eth1"; None: every one it finds
    address: str = "127.0.0.1"  # where peers' datagrams wake this worker's thread
    probe_bytes: int = 4 << 20  # size of the scratch region and of each bandwidth probe
    periods: PollingPeriods = field(default_factory=PollingPeriods)


@dataclass(frozen=True, slots=True)
class _Connection:
    link: PeerConnected
    num_blocks: int


class NixlTransport:
    """One worker's end (see `kv_transfer.transport.Transport`). Opening the agent blocks for about 0.5 s.

    Args:
        ref: becomes the agent's name, so it must never have been used before.
        pool: registered whole; must outlive the transport.
        scratch: memory of `pool`'s kind that peers may overwrite with probes; allocated here for DRAM.
    Raises: InvariantBroken: a VRAM pool without scratch. RuntimeError: NIXL cannot open an agent here.
    """

    def __init__(
        self,
        ref: WorkerRef,
        identity: CacheIdentity,
        pool: MemoryPool,
        config: NixlConfig | None = None,
        scratch: MemoryPool | None = None,
    ) -> None:
        self._ref = ref
        self._config = config or NixlConfig()
        self._pool = pool
        if scratch is None:
            if pool.memory_kind != "DRAM":
                raise InvariantBroken("a VRAM pool needs a scratch region of the same device")
            self._scratch_memory = np.ones(self._config.probe_bytes, dtype=np.uint8)
            scratch = MemoryPool((self._scratch_memory.ctypes.data,), 1, self._config.probe_bytes)
        self._scratch = scratch
        self._connections: dict[WorkerRef, _Connection] = {}
        self._connecting: dict[WorkerRef, asyncio.Task[PeerConnected]] = {}
        self._inbox: deque[tuple[WorkerRef, bytes]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_notice: NoticeHandler | None = None
        self._on_peer_lost: LostHandler | None = None
        self._closing: asyncio.Task[None] | None = None
        self._doorbell = Doorbell(self._config.address)
        self._thread = NixlThread(self._open_engine, self._doorbell, self._config.periods)
        envelope = Envelope(
            scratch.base_addresses[0],
            scratch.run_bytes,
            this_host(),
            self._doorbell.address,
            self._thread.engine.metadata(),
        )
        self._description = PoolDescription(
            ref=ref,
            identity=identity,
            transport=TRANSPORT_NAME,
            transport_version=TRANSPORT_VERSION,
            pool=pool,
            agent_metadata=envelope.encode(),
        )

    def describe(self) -> PoolDescription:
        return self._description

    def stats(self) -> TransportStats:
        """A copy of the counters."""
        return replace(self._thread.engine.stats)

    def listen(self, on_notice: NoticeHandler, on_peer_lost: LostHandler) -> None:
        """Call from the owner's event loop. Notices that came before are delivered now."""
        if self._loop is not None:
            raise InvariantBroken("listen called twice")
        self._on_notice, self._on_peer_lost = on_notice, on_peer_lost
        self._loop = asyncio.get_running_loop()
        self._loop.call_soon(self._deliver_notices)

    async def connect(self, peer: PoolDescription) -> PeerConnected:
        require_compatible(self._description, peer)
        if self._closing is not None:
            raise WorkerLost(peer.ref.worker_id, "this transport is closed")
        if peer.ref in self._connections:
            return self._connections[peer.ref].link
        task = self._connecting.get(peer.ref)
        if task is None:
            task = asyncio.create_task(self._connect(peer))
            self._connecting[peer.ref] = task
            task.add_done_callback(lambda done: self._connect_ended(peer.ref, done))
        return await asyncio.shield(task)  # another caller may wait for the same connect

    async def push(
        self, peer: WorkerRef, source_blocks: Sequence[int], target_blocks: Sequence[int], notice: bytes
    ) -> None:
        connection = self._connection(peer)
        require_blocks(source_blocks, self._pool.num_blocks, target_blocks, connection.num_blocks)
        if not source_blocks:
            await self.notify(peer, notice)
            return
        num_runs = len(self._pool.base_addresses)
        source = block_indices(source_blocks, self._pool.num_blocks, num_runs)
        target = block_indices(target_blocks, connection.num_blocks, num_runs)
        await self._thread.submit(lambda engine, done: engine.write(peer, source, target, notice, done))

    async def notify(self, peer: WorkerRef, notice: bytes) -> None:
        self._connection(peer)
        await self._call(lambda engine: engine.notify(peer, notice))

    async def drop(self, peer: WorkerRef) -> None:
        """As the interface says, within `drop_timeout_s`.

        Raises: TransferFailed: operations to a frozen peer have not settled. They stay in flight, counted as zombies;
            the peer is forgotten once they settle, and can be dropped again to wait for that.
        """
        self._connections.pop(peer, None)
        if self._closing is None:
            await self._drop(peer)

    async def close(self) -> None:
        """Waits up to `drop_timeout_s` for what is in flight; what is left ends with the agent."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _connect(self, peer: PoolDescription) -> PeerConnected:
        envelope = Envelope.decode(peer.agent_metadata)
        scratch = envelope.scratch_of(peer)
        pool = peer.pool
        await self._call(lambda engine: engine.add_peer(peer.ref, envelope.metadata, pool, scratch, envelope.bell))
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                link = await self._warm(peer.ref, scratch.run_bytes, envelope.host == this_host())
            # Before the engine may report its loss, so that the loss finds it.
            self._connections[peer.ref] = _Connection(link, peer.pool.num_blocks)
            await self._call(lambda engine: engine.announce(peer.ref))
        except BaseException as error:
            self._connections.pop(peer.ref, None)
            self._thread.submit(lambda engine, done: engine.drop(peer.ref, done))
            if isinstance(error, TimeoutError):
                message = f"no answer within {self._config.connect_timeout_s} s"
                raise WorkerLost(peer.ref.worker_id, message) from None
            raise
        return link

    async def _warm(self, peer: WorkerRef, scratch_bytes: int, same_host: bool) -> PeerConnected:
        """Set the connection up by a first small write, then time some large ones."""
        num_bytes = min(self._scratch.run_bytes, scratch_bytes)
        await self._probe(peer, min(_WARM_BYTES, num_bytes))
        probes = [await self._probe(peer, num_bytes) for _ in range(NUM_PROBES)]
        lane, gbps = infer_path(same_host, self._pool.memory_kind, num_bytes, probes)
        if lane == LANE_LOOPBACK:
            reason = "it is on this host: share PID and IPC namespaces and the uid"
            log_state(logger, logging.WARNING, peer=peer, state="looks like TCP", gbps=gbps, reason=reason)
        return PeerConnected(peer, lane, gbps)

    async def _probe(self, peer: WorkerRef, num_bytes: int) -> Probe:
        before = network_bytes_sent()
        seconds: float = await self._thread.submit(lambda engine, done: engine.probe(peer, num_bytes, done))
        return Probe(seconds, network_bytes_sent() - before)

    def _connect_ended(self, peer: WorkerRef, task: asyncio.Task[PeerConnected]) -> None:
        del self._connecting[peer]
        if not task.cancelled():
            task.exception()  # retrieved: whoever waited may have been cancelled

    async def _drop(self, peer: WorkerRef) -> None:
        try:
            async with asyncio.timeout(self._config.drop_timeout_s):
                await self._thread.submit(lambda engine, done: engine.drop(peer, done))
        except TimeoutError:
            raise TransferFailed(f"operations to {peer} have not settled; its pages stay locked") from None

    async def _close(self) -> None:
        for task in self._connecting.values():
            task.cancel()
        self._connections.clear()
        with suppress(TimeoutError, InvariantBroken):
            async with asyncio.timeout(self._config.drop_timeout_s):
                await self._thread.submit(lambda engine, done: engine.drain(done))
        await self._thread.stop()

    async def _call(self, call: Callable[[NixlEngine], None]) -> None:
        """Run a call that is over when it returns, in the thread."""

        def run(engine: NixlEngine, done: Completion) -> None:
            call(engine)
            done.resolve(None)

        await self._thread.submit(run)

    def _connection(self, peer: WorkerRef) -> _Connection:
        connection = self._connections.get(peer)
        if connection is None:
            raise WorkerLost(peer.worker_id, f"{peer} is not connected")
        return connection

    def _open_engine(self) -> NixlEngine:
        library = load_nixl(self._pool.memory_kind, self._config.interface)
        return NixlEngine(
            library,
            str(self._ref),
            self._pool,
            self._scratch,
            self._doorbell.ring,
            self._notice_came,
            self._peer_was_lost,
        )

    def _notice_came(self, sender: WorkerRef, notice: bytes) -> None:
        """In the thread. Before `listen` notices wait in the inbox."""
        self._inbox.append((sender, notice))
        self._call_owner(self._deliver_notices)

    def _peer_was_lost(self, peer: WorkerRef) -> None:
        """In the thread."""
        self._call_owner(lambda: self._forget_lost(peer))

    def _call_owner(self, callback: Callable[[], None]) -> None:
        if self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            logger.debug("event loop closed before the transport was")

    def _deliver_notices(self) -> None:
        while self._inbox and self._on_notice is not None:
            self._on_notice(*self._inbox.popleft())

    def _forget_lost(self, peer: WorkerRef) -> None:
        self._connections.pop(peer, None)
        if self._on_peer_lost is not None:
            self._on_peer_lost(peer)
