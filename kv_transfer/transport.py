"""How KV bytes and notices move between two workers: one small interface, several backends, one shared test suite.

A transport is written for one owner: all calls come from one asyncio loop. Push only: the owner of the bytes writes.
What no backend can promise, and the sessions above must therefore guarantee: a push cannot be cancelled, a peer
can be frozen and write later, and nothing stops a peer from writing to a page that we have given to someone else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from core.membership import WorkerRef
from core.messages import PeerConnected
from kv_transfer.pool import PoolDescription


@dataclass(slots=True)
class TransportStats:
    """A total since start and two gauges. Written by one thread; read a copy of it through `stats()`."""

    peers_lost: int = 0  # since start
    in_flight: int = 0  # posted, not settled
    zombies: int = 0  # the ones in flight to a peer that was dropped or lost


NoticeHandler = Callable[[WorkerRef, bytes], None]
LostHandler = Callable[[WorkerRef], None]


class Transport(Protocol):
    """One worker's end. Handlers are called in the owner's event loop, never from another thread."""

    def describe(self) -> PoolDescription:
        """This worker's own pool, to hand to peers."""
        ...

    def stats(self) -> TransportStats:
        """A copy of the counters."""
        ...

    def listen(self, on_notice: NoticeHandler, on_peer_lost: LostHandler) -> None:
        """Set who hears of notices and of dead peers; called once, before the first connect."""
        ...

    async def connect(self, peer: PoolDescription) -> PeerConnected:
        """Make ready to push to `peer` and to notify it; idempotent for one incarnation.

        Raises: PeerRefused: a field of the description differs, named. WorkerLost: the peer does not answer
            within the connect bound.
        """
        ...

    async def push(
        self, peer: WorkerRef, source_blocks: Sequence[int], target_blocks: Sequence[int], notice: bytes
    ) -> None:
        """Write blocks of our pool into the peer's, then deliver `notice` there, ordered after the bytes.

        Returns only when our side is settled: the bytes are out and our blocks may be reused. Cancelling the
        awaiting task does not stop the bytes; the transport keeps the operation until it settles.
        Empty block lists deliver the notice alone.
        Raises: WorkerLost: the peer is gone (settled too). TransferFailed: the push could not be posted (settled).
            InvariantBroken: lists of unequal length, or a block id outside either pool.
        """
        ...

    async def notify(self, peer: WorkerRef, notice: bytes) -> None:
        """Deliver a notice alone. Raises: WorkerLost: the peer is gone or was never connected."""
        ...

    async def drop(self, peer: WorkerRef) -> None:
        """Forget a peer: after this no operation to it is in flight or will be. Unknown peers are ignored.

        Raises: TransferFailed: some are, and have not settled within the backend's bound.
        """
        ...

    async def close(self) -> None:
        """Drop every peer and free the registration. Idempotent."""
        ...
