"""All calls to NIXL, by one thread: peers, operations, and what becomes of them. No asyncio, no locks, no waiting.

Life of an operation:
  1. posted: the handle is kept; source pages may still be read.
  2. polled until NIXL says DONE, or that the peer's endpoint is dead. Nothing else makes pages quiet: a released
     handle goes on moving bytes.
  3. settled: the handle is released and the caller told.
Life of a peer: added, then announced (its probe went well), then closing (dropped by us) or lost (endpoint dead),
and removed from NIXL when its last operation has settled.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from core.errors import PeerRefused, TransferFailed, WorkerLost
from core.membership import WorkerRef
from kv_transfer.doorbell import BellAddress
from kv_transfer.nixl_library import LOCAL_SIDE, Indices, NixlLibrary, prepare_blocks, register_region
from kv_transfer.nixl_operation import Completion, Operation, Peer
from kv_transfer.pool import MemoryPool
from kv_transfer.transport import TransportStats
from telemetry.logs import log_state

logger = logging.getLogger(__name__)

# Every notification starts with one of these; NIXL would send none for an empty notice.
_NOTICE: Final = b"N"
_GOODBYE: Final = b"G"  # its sender is closing
_GOODBYE_POLLS: Final = 20  # notifications leave while their sender polls

# A target that sleeps takes no part in a transfer over TCP. Less than it stays awake after a ring
# (kv_transfer/polling.py).
_RING_AGAIN_S: Final = 5e-3


class NixlEngine:
    """One agent, its registered pool, and a scratch region that peers may write probes to.

    Args:
        scratch: memory that carries nothing; peers overwrite it when they connect.
        ring: wake a peer's thread: something was posted to it.
        on_notice: (sender, notice).
        on_lost: an announced peer said goodbye or its endpoint is dead; told once.
    """

    def __init__(
        self,
        library: NixlLibrary,
        name: str,
        pool: MemoryPool,
        scratch: MemoryPool,
        ring: Callable[[BellAddress], None],
        on_notice: Callable[[WorkerRef, bytes], None],
        on_lost: Callable[[WorkerRef], None],
    ) -> None:
        self._library = library
        self._agent = library.open_agent(name)
        self._scratch = scratch
        self._ring = ring
        self._on_notice = on_notice
        self._on_lost = on_lost
        self._peers: dict[WorkerRef, Peer] = {}
        self._operations: list[Operation] = []
        self._drain_waiters: list[Completion] = []
        self.stats = TransportStats()
        self._registered = [*register_region(self._agent, pool), *register_region(self._agent, scratch)]
        self._blocks = prepare_blocks(self._agent, LOCAL_SIDE, pool)

    @property
    def num_in_flight(self) -> int:
        return len(self._operations)

    def metadata(self) -> bytes:
        """What a peer's agent needs to reach this one."""
        metadata: bytes = self._agent.get_agent_metadata()
        return metadata

    def add_peer(
        self, ref: WorkerRef, metadata: bytes, pool: MemoryPool, scratch: MemoryPool, bell: BellAddress
    ) -> None:
        """Make ready to write to a peer.

        Raises: PeerRefused: the metadata is not that peer's, or does not cover its pool. WorkerLost: no route to
            it, or its earlier operations have not settled yet.
        """
        if ref in self._peers:
            raise WorkerLost(ref.worker_id, "earlier operations to it have not settled")
        try:
            added = self._agent.add_remote_agent(metadata)
        except self._library.errors as error:
            if "Backend" in type(error).__name__:
                raise WorkerLost(ref.worker_id, f"no route to it: {error}") from error
            raise PeerRefused("agent_metadata", "readable", f"{type(error).__name__}: {error}") from error
        name = added.decode() if isinstance(added, bytes) else added
        try:
            if name != str(ref):
                raise PeerRefused("agent_metadata", str(ref), name)
            self._peers[ref] = Peer(ref, prepare_blocks(self._agent, name, pool), scratch, bell)
        except self._library.errors as error:
            self._agent.remove_remote_agent(name)
            raise PeerRefused("base_addresses", "a registered pool", f"{type(error).__name__}: {error}") from error
        except PeerRefused:
            self._agent.remove_remote_agent(name)
            raise

    def announce(self, ref: WorkerRef) -> None:
        """From now on the peer's loss is reported to `on_lost`, not to who connects."""
        self._usable(ref).announced = True

    def write(
        self, ref: WorkerRef, source_indices: Indices, target_indices: Indices, notice: bytes, done: Completion
    ) -> None:
        """Post a push; `done` resolves to the seconds it took. Indices of descriptors were checked by the caller.

        One descriptor a block, adjacent blocks not merged: at 720 KiB a block and 8 to 256 adjacent blocks, merging
        made -15 to +2 % over CMA and -15 to +10 % over TCP, which is noise, and needs unprepared lists.
        """
        peer = self._usable(ref)
        try:
            handle = self._agent.make_prepped_xfer(
                "WRITE", self._blocks, source_indices, peer.blocks, target_indices, _NOTICE + notice
            )
        except self._library.errors as error:
            raise TransferFailed(f"push to {ref} not posted: {type(error).__name__}: {error}") from error
        self._post(peer, handle, done)

    def probe(self, ref: WorkerRef, num_bytes: int, done: Completion) -> None:
        """Write `num_bytes` of scratch to the peer's, without a notification; `done` resolves to seconds."""
        peer = self._usable(ref)
        sides = [
            self._agent.get_xfer_descs(
                [(region.base_addresses[0], num_bytes, region.device_ids[0])], region.memory_kind
            )
            for region in (self._scratch, peer.scratch)
        ]
        try:
            handle = self._agent.initialize_xfer("WRITE", *sides, peer.name)
        except self._library.errors as error:
            raise PeerRefused("agent_metadata", "a registered scratch region", str(error)) from error
        self._post(peer, handle, done)

    def notify(self, ref: WorkerRef, notice: bytes) -> None:
        """Queue a notice; it leaves with this and the next polls. Raises: WorkerLost."""
        peer = self._usable(ref)
        try:
            self._agent.send_notif(peer.name, _NOTICE + notice)
        except self._library.errors as error:
            self._lose(peer)
            self._remove_if_settled(peer)
            raise WorkerLost(ref.worker_id, f"notice: {type(error).__name__}: {error}") from error
        self._wake(peer)

    def drop(self, ref: WorkerRef, done: Completion) -> None:
        """Take nothing new for a peer; `done` resolves once nothing is in flight to it and it is forgotten."""
        peer = self._peers.get(ref)
        if peer is None:
            done.resolve(None)
            return
        peer.drop_waiters.append(done)
        self._remove_if_settled(peer)

    def drain(self, done: Completion) -> None:
        """`done` resolves once nothing is in flight to anyone."""
        self._drain_waiters.append(done)

    def poll(self) -> bool:
        """Move everything on by one step. Returns whether anything happened."""
        notices = self._agent.get_new_notifs()
        for sender, messages in notices.items():
            for message in messages:
                self._receive(sender, message)
        settled: list[Operation] = []
        open_operations: list[Operation] = []
        for operation in self._operations:
            (settled if self._advance(operation) else open_operations).append(operation)
        self._operations = open_operations
        for operation in settled:
            self._remove_if_settled(operation.peer)
        for operation in open_operations:
            if time.perf_counter() - operation.peer.rung_s > _RING_AGAIN_S:
                self._wake(operation.peer)
        while self._drain_waiters and not self._operations:
            self._drain_waiters.pop().resolve(None)
        self.stats.in_flight = len(self._operations)
        self.stats.zombies = sum(operation.peer.leaving for operation in self._operations)
        return bool(notices or settled)

    def close(self) -> None:
        """Say goodbye and free the agent. Operations in flight end with it: writes stop when their sender is gone.

        UCX notices that an agent is gone by its TCP connection or its process: over shared memory, with the process
        alive, peers would go on writing. Peers that we never connected to cannot be told.
        """
        self._say_goodbye()
        if self._operations:
            log_state(logger, logging.WARNING, state="closing", in_flight=len(self._operations))
        for operation in self._operations:
            operation.done.fail(WorkerLost(operation.peer.ref.worker_id, "transport closed before the peer answered"))
            self._release(operation)
        self._operations.clear()
        for peer in list(self._peers.values()):
            self._remove(peer)
        self._blocks.release()
        for registration in self._registered:
            self._agent.deregister_memory(registration)
        self._blocks = self._agent = None  # the last references: only now do peers see us gone

    def _receive(self, sender: str, message: bytes) -> None:
        kind, notice = message[:1], message[1:]
        if "@" not in sender or kind not in (_NOTICE, _GOODBYE):
            log_state(logger, logging.WARNING, peer=sender, state="notice dropped", reason="of unknown form")
            return
        ref = WorkerRef.parse(sender)
        if kind == _NOTICE:
            self._on_notice(ref, notice)
        elif (peer := self._peers.get(ref)) is not None:
            self._lose(peer)
            self._remove_if_settled(peer)

    def _say_goodbye(self) -> None:
        """Not to who may still get bytes of ours: goodbye means that none will come."""
        for peer in self._peers.values():
            if not peer.lost and not peer.num_operations:
                with suppress(*self._library.errors):
                    self._agent.send_notif(peer.name, _GOODBYE)
        for _ in range(_GOODBYE_POLLS if self._peers else 0):
            self._agent.get_new_notifs()
        for peer in self._peers.values():
            self._wake(peer)

    def _post(self, peer: Peer, handle: Any, done: Completion) -> None:
        operation = Operation(peer, handle, done, time.perf_counter())
        peer.num_operations += 1
        if self._is_over(operation, lambda: self._transfer(peer, handle)):
            self._remove_if_settled(peer)
        else:
            self._operations.append(operation)

    def _transfer(self, peer: Peer, handle: Any) -> str:
        state: str = self._agent.transfer(handle)
        self._wake(peer)  # at once: to tell the caller may take until the event loop lets go of the interpreter
        return state

    def _wake(self, peer: Peer) -> None:
        peer.rung_s = time.perf_counter()
        self._ring(peer.bell)

    def _advance(self, operation: Operation) -> bool:
        return self._is_over(operation, lambda: self._agent.check_xfer_state(operation.handle))

    def _is_over(self, operation: Operation, step: Callable[[], str]) -> bool:
        """Take one step of an operation; whether it is settled. Tells its caller if so.

        Any error counts as a dead endpoint: part of a push may have been posted before it was raised, so the peer
        cannot be trusted with more. NIXL 1.5.1 raises where its API promises the state "ERR"; both are caught.
        """
        try:
            state = step()
        except self._library.errors as error:
            state = f"{type(error).__name__}: {error}"
        if state == "PROC":
            return False
        seconds = time.perf_counter() - operation.posted_s
        self._release(operation)
        operation.peer.num_operations -= 1
        if state == "DONE":
            operation.done.resolve(seconds)
        else:
            operation.done.fail(WorkerLost(operation.peer.ref.worker_id, state))
            self._lose(operation.peer)
        return True

    def _release(self, operation: Operation) -> None:
        try:
            operation.handle.release()
        except self._library.errors:
            logger.warning("handle of an operation to %s not released", operation.peer.name, exc_info=True)

    def _usable(self, ref: WorkerRef) -> Peer:
        peer = self._peers.get(ref)
        if peer is None or peer.leaving:
            raise WorkerLost(ref.worker_id, "not connected")
        return peer

    def _lose(self, peer: Peer) -> None:
        """The peer's other operations raise too when they are next polled; it is removed after the last."""
        if peer.lost:
            return
        peer.lost = True
        if peer.announced and not peer.drop_waiters:
            self.stats.peers_lost += 1
            self._on_lost(peer.ref)

    def _remove_if_settled(self, peer: Peer) -> None:
        if peer.leaving and not peer.num_operations and self._peers.get(peer.ref) is peer:
            self._remove(peer)

    def _remove(self, peer: Peer) -> None:
        del self._peers[peer.ref]
        peer.blocks.release()
        self._agent.remove_remote_agent(peer.name)
        for waiter in peer.drop_waiters:
            waiter.resolve(None)
