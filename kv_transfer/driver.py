"""Performs what the hand-off sessions ask for, over a real transport, and brings back what came of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from core.errors import TransferFailed, WorkerLost
from core.handoff import BlocksPushed
from core.membership import WorkerRef
from kv_transfer.effects import Effect, Notify, Push, SourceEnded, TargetFailed, TargetLanded
from kv_transfer.notice_codec import decode_notice, encode_notice
from kv_transfer.session import HandoffSessions
from kv_transfer.transport import PeerLink, PoolDescription, Transport
from telemetry.logs import log_state
from telemetry.tasks import BackgroundTasks

logger = logging.getLogger(__name__)

Clock = Callable[[], float]
Outcome = SourceEnded | TargetLanded | TargetFailed


class HandoffDriver:
    """One worker's hand-offs over one transport. All calls come from one asyncio loop.

    on_outcome: told of every hand-off that ended. `on_peer_lost`: of every peer that cannot be reached any more.
    `on_push`: of every push that settled: its blocks, whether they arrived, how long it took in seconds.
    on_broken: an error that no caller can act on came up; this process must end.
    """

    def __init__(
        self,
        transport: Transport,
        sessions: HandoffSessions,
        clock: Clock,
        on_outcome: Callable[[Outcome], None],
        on_broken: Callable[[BaseException], None],
    ) -> None:
        self._transport = transport
        self._sessions = sessions
        self._clock = clock
        self._on_outcome = on_outcome
        self._tasks = BackgroundTasks(on_broken)
        self.on_peer_lost: Callable[[WorkerRef], None] = lambda _peer: None
        self.on_push: Callable[[int, bool, float], None] = lambda _num_blocks, _delivered, _duration_s: None
        transport.listen(self._notice, self._peer_lost)

    def perform(self, effects: Iterable[Effect]) -> None:
        """Start each effect; outcomes come back through the sessions."""
        for effect in effects:
            match effect:
                case Push():
                    self._tasks.spawn(self._push(effect))
                case Notify():
                    self._tasks.spawn(self._notify(effect))
                case SourceEnded() | TargetLanded() | TargetFailed():
                    self._on_outcome(effect)

    async def connect(self, peer: PoolDescription) -> PeerLink:
        """Warm the path to a peer. Raises as Transport.connect."""
        return await self._transport.connect(peer)

    async def peer_dead(self, peer: WorkerRef) -> None:
        """The peer's process has ended: end its hand-offs and forget it."""
        self.perform(self._sessions.peer_dead(peer, self._clock()))
        try:
            await self._transport.drop(peer)
        except TransferFailed as error:  # its operations are kept and will settle; their blocks stay held until then
            log_state(logger, logging.WARNING, peer=peer, state="unsettled", reason=str(error))

    def tick(self) -> None:
        """Let leases and retries see the time; call it a few times a second."""
        self.perform(self._sessions.tick(self._clock()))

    async def close(self, timeout_s: float) -> None:
        """Wait, bounded, for what is under way, then close the transport."""
        await self._tasks.settle(timeout_s)
        await self._transport.close()

    async def _push(self, push: Push) -> None:
        delivered, start_s = True, self._clock()
        try:
            await self._transport.push(push.peer, push.source_blocks, push.target_blocks, encode_notice(push.notice))
        except (TransferFailed, WorkerLost) as error:
            log_state(
                logger,
                logging.WARNING,
                handoff_id=push.notice.handoff_id,
                peer=push.peer,
                state="push failed",
                reason=str(error),
            )
            delivered = False
        self.on_push(len(push.source_blocks), delivered, self._clock() - start_s)
        assert isinstance(push.notice.body, BlocksPushed)
        source = self._sessions.source
        self.perform(source.push_settled(push.notice.handoff_id, push.notice.body.sequence, delivered=delivered))

    async def _notify(self, effect: Notify) -> None:
        try:
            await self._transport.notify(effect.peer, encode_notice(effect.notice))
        except (TransferFailed, WorkerLost):
            self._peer_lost(effect.peer)

    def _notice(self, sender: WorkerRef, payload: bytes) -> None:
        notice = decode_notice(payload)
        if notice is None:
            log_state(logger, logging.WARNING, peer=sender, state="notice dropped", num_bytes=len(payload))
            return
        self.perform(self._sessions.notice(sender, notice, self._clock()))

    def _peer_lost(self, peer: WorkerRef) -> None:
        self.perform(self._sessions.peer_lost(peer, self._clock()))
        self.on_peer_lost(peer)
