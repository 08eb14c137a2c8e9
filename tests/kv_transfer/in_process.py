"""KV transfer between workers of one process: for quick tests, with the faults of a real fabric on demand.

Same semantics as NIXL's: a push to a frozen worker stays in flight and lands on thaw; the death of a worker is noticed
by the operations to it, not by itself; notices of one sender arrive in order. Everything happens in the event loop,
in the order it was asked for.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from core.errors import InvariantBroken, TransferFailed, WorkerLost
from core.identity import CacheIdentity
from core.membership import WorkerRef
from core.messages import PeerConnected
from kv_transfer.pool import MemoryPool, PoolDescription, require_blocks, require_compatible
from kv_transfer.transport import LostHandler, NoticeHandler, TransportStats

TRANSPORT_NAME: Final = "in-process"
TRANSPORT_VERSION: Final = "1"
DROP_TIMEOUT_S: Final = 2.0


@dataclass(slots=True, eq=False)
class _Operation:
    source: InProcessTransport
    source_blocks: tuple[int, ...]
    target_blocks: tuple[int, ...]
    notice: bytes
    settled: asyncio.Future[None]


@dataclass(slots=True)
class InProcessNetwork:
    """The workers that can reach each other, and what is wrong with the ways between them.

    delay_s: from a push or notice to its arrival. Change it before traffic, not under it.
    """

    delay_s: float = 0.0
    _ends: dict[WorkerRef, InProcessTransport] = field(default_factory=dict)
    _frozen: set[WorkerRef] = field(default_factory=set)
    _queues: dict[WorkerRef, deque[_Operation]] = field(default_factory=dict)

    def freeze(self, worker: WorkerRef) -> None:
        """What is sent to `worker` stays in flight until `thaw`."""
        self._frozen.add(worker)

    def thaw(self, worker: WorkerRef) -> None:
        """Everything that was in flight to `worker` arrives, in order."""
        self._frozen.discard(worker)
        for _ in range(len(self._queues.get(worker, ()))):
            asyncio.get_running_loop().call_soon(self._arrive, worker)

    def kill(self, worker: WorkerRef) -> None:
        """`worker` is dead: what is in flight to it fails now, later operations fail at once."""
        self._ends.pop(worker, None)
        for operation in self._queues.pop(worker, ()):
            operation.source._fail(worker, operation)

    def _join(self, end: InProcessTransport) -> None:
        if end.ref in self._ends:
            raise InvariantBroken(f"{end.ref} is already in the network: an incarnation is used once")
        self._ends[end.ref] = end

    def _end(self, worker: WorkerRef) -> InProcessTransport | None:
        return self._ends.get(worker)

    def _send(self, worker: WorkerRef, operation: _Operation) -> None:
        self._queues.setdefault(worker, deque()).append(operation)
        asyncio.get_running_loop().call_later(self.delay_s, self._arrive, worker)

    def _arrive(self, worker: WorkerRef) -> None:
        """One arrival is due; the first in the queue it is, so order holds whatever the timers do."""
        queue = self._queues.get(worker)
        if queue and worker not in self._frozen:
            self._ends[worker]._receive(queue.popleft())


class InProcessTransport:
    """One worker's end (see `kv_transfer.transport.Transport`). `pool` is addressed directly and must outlive it."""

    def __init__(
        self,
        network: InProcessNetwork,
        ref: WorkerRef,
        identity: CacheIdentity,
        pool: MemoryPool,
    ) -> None:
        self.ref = ref
        self._network = network
        self._pool = pool
        self._peers: dict[WorkerRef, MemoryPool] = {}
        self._in_flight: dict[WorkerRef, list[_Operation]] = {}
        self._on_notice: NoticeHandler | None = None
        self._on_peer_lost: LostHandler | None = None
        self._early_notices: list[tuple[WorkerRef, bytes]] = []
        self._closed = False
        self._stats = TransportStats()
        self._description = PoolDescription(
            ref=ref,
            identity=identity,
            transport=TRANSPORT_NAME,
            transport_version=TRANSPORT_VERSION,
            pool=pool,
            agent_metadata=b"",
        )
        network._join(self)

    def describe(self) -> PoolDescription:
        return self._description

    def stats(self) -> TransportStats:
        """A copy of the counters."""
        zombies = sum(len(waiting) for peer, waiting in self._in_flight.items() if peer not in self._peers)
        return replace(self._stats, in_flight=sum(map(len, self._in_flight.values())), zombies=zombies)

    def listen(self, on_notice: NoticeHandler, on_peer_lost: LostHandler) -> None:
        if self._on_notice is not None:
            raise InvariantBroken("listen called twice")
        self._on_notice, self._on_peer_lost = on_notice, on_peer_lost
        while self._early_notices:
            asyncio.get_running_loop().call_soon(on_notice, *self._early_notices.pop(0))

    async def connect(self, peer: PoolDescription) -> PeerConnected:
        require_compatible(self._description, peer)
        if self._closed or self._network._end(peer.ref) is None:
            raise WorkerLost(peer.ref.worker_id, f"{peer.ref} is not in the network")
        if self._in_flight.get(peer.ref) and peer.ref not in self._peers:
            raise WorkerLost(peer.ref.worker_id, "earlier operations to it have not settled")
        self._peers[peer.ref] = peer.pool
        return PeerConnected(peer.ref, TRANSPORT_NAME, probe_gbps=0.0)

    async def push(
        self, peer: WorkerRef, source_blocks: Sequence[int], target_blocks: Sequence[int], notice: bytes
    ) -> None:
        require_blocks(source_blocks, self._pool.num_blocks, target_blocks, self._peer(peer).num_blocks)
        operation = _Operation(
            self, tuple(source_blocks), tuple(target_blocks), notice, asyncio.get_running_loop().create_future()
        )
        self._in_flight.setdefault(peer, []).append(operation)
        if self._network._end(peer) is None:
            self._fail(peer, operation)
        else:
            self._network._send(peer, operation)
        if source_blocks or operation.settled.done():
            await asyncio.shield(operation.settled)

    async def notify(self, peer: WorkerRef, notice: bytes) -> None:
        await self.push(peer, (), (), notice)  # like NIXL's, does not wait for the arrival

    async def drop(self, peer: WorkerRef) -> None:
        """Raises: TransferFailed: operations to a frozen peer have not settled within DROP_TIMEOUT_S."""
        self._peers.pop(peer, None)
        waiting = [operation.settled for operation in self._in_flight.get(peer, ())]
        if waiting and (await asyncio.wait(waiting, timeout=DROP_TIMEOUT_S))[1]:
            raise TransferFailed(f"operations to {peer} have not settled; its pages stay locked")

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await asyncio.gather(*map(self.drop, list(self._peers)), return_exceptions=True)
        self._network.kill(self.ref)

    def _peer(self, peer: WorkerRef) -> MemoryPool:
        pool = self._peers.get(peer)
        if pool is None:
            raise WorkerLost(peer.worker_id, f"{peer} is not connected")
        return pool

    def _receive(self, operation: _Operation) -> None:
        """Copy, then tell: the notice never comes before its bytes."""
        source, part_bytes = operation.source, self._pool.part_bytes
        runs = list(zip(source._pool.base_addresses, self._pool.base_addresses, strict=True))
        for source_block, target_block in zip(operation.source_blocks, operation.target_blocks, strict=True):
            for source_run, target_run in runs:
                ctypes.memmove(
                    target_run + target_block * part_bytes, source_run + source_block * part_bytes, part_bytes
                )
        if self._on_notice is None:
            self._early_notices.append((source.ref, operation.notice))
        else:
            self._on_notice(source.ref, operation.notice)
        source._settle(self.ref, operation)

    def _settle(self, peer: WorkerRef, operation: _Operation) -> None:
        self._in_flight[peer].remove(operation)
        operation.settled.set_result(None)

    def _fail(self, peer: WorkerRef, operation: _Operation) -> None:
        self._in_flight[peer].remove(operation)
        operation.settled.set_exception(WorkerLost(peer.worker_id, f"{peer} is dead"))
        operation.settled.exception()  # retrieved: whoever waited may have been cancelled
        if self._peers.pop(peer, None) is not None:
            self._stats.peers_lost += 1
            if self._on_peer_lost is not None:
                self._on_peer_lost(peer)
