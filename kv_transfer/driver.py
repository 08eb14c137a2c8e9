"""Performs what the hand-off sessions ask for, over a real transport, and brings back what came of it.

A push waits for its peer's credit, gets its checksums, goes out and settles. A notice that says what was pushed is
checked before the sessions hear of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from core.errors import TransferFailed, WorkerLost
from core.handoff import BlocksPushed, HandoffNotice
from core.membership import WorkerRef
from core.messages import PeerConnected
from kv_transfer.checksum import BlockChecksums
from kv_transfer.credit import AskedPush, PushCredit
from kv_transfer.effects import Effect, Notify, Push, SourceEnded, TargetFailed, TargetLanded
from kv_transfer.notice_codec import decode_notice, encode_notice
from kv_transfer.pace import TransferPace
from kv_transfer.pool import PoolDescription
from kv_transfer.session import HandoffSessions
from kv_transfer.transport import Transport
from telemetry.logs import log_state
from telemetry.tasks import BackgroundTasks

logger = logging.getLogger(__name__)

Clock = Callable[[], float]
HandoffOutcome = SourceEnded | TargetLanded | TargetFailed


@dataclass(frozen=True, slots=True)
class PushReport:
    """One push that is over.

    wait_s: for credit and checksums. push_s: from its post until it settled. exposed_s: the part of both that came
    after the hand-off's last push was asked for, when nothing was left to compute beside it.
    """

    num_blocks: int
    delivered: bool
    wait_s: float
    push_s: float
    exposed_s: float


@dataclass(slots=True)
class TransferListener:
    """Who hears of what, for metrics and paths. A fresh one ignores everything.

    peer_lost: a peer cannot be reached any more. pushed: a push settled. landed: seconds from a hand-off's last push
    until its target said Landed. verified: seconds that checking a push took, and whether all of it was whole.
    """

    peer_lost: Callable[[WorkerRef], None] = lambda _peer: None
    pushed: Callable[[PushReport], None] = lambda _report: None
    landed: Callable[[float], None] = lambda _duration_s: None
    verified: Callable[[float, bool], None] = lambda _duration_s, _whole: None


class HandoffDriver:
    """One worker's hand-offs over one transport. All calls come from one asyncio loop.

    on_outcome: told of every hand-off that ended.
    on_broken: an error that no caller can act on came up; this process must end.
    checksums: of our pool: added to what we push, compared with what we are pushed; None: neither.
    """

    def __init__(
        self,
        transport: Transport,
        sessions: HandoffSessions,
        clock: Clock,
        on_outcome: Callable[[HandoffOutcome], None],
        on_broken: Callable[[BaseException], None],
        credit: PushCredit,
        pace: TransferPace,
        checksums: BlockChecksums | None = None,
    ) -> None:
        self._transport = transport
        self._sessions = sessions
        self._clock = clock
        self._on_outcome = on_outcome
        self._credit = credit
        self._pace = pace
        self._checksums = checksums
        self._tasks = BackgroundTasks(on_broken)
        self._last_asked_s: dict[str, float] = {}  # by hand-off, from its last push until its source side ends
        self.listener = TransferListener()
        transport.listen(self._notice, self._peer_lost)

    def perform(self, effects: Iterable[Effect]) -> None:
        """Start each effect; outcomes come back through the sessions."""
        for effect in effects:
            match effect:
                case Push():
                    self._ask(effect)
                case Notify():
                    self._tasks.spawn(self._notify(effect))
                case SourceEnded():
                    self._source_ended(effect)
                case TargetLanded() | TargetFailed():
                    self._on_outcome(effect)

    async def connect(self, peer: PoolDescription) -> PeerConnected:
        """Warm the path to a peer. Raises as Transport.connect."""
        link = await self._transport.connect(peer)
        self._pace.probed(link.peer, link.probe_gbps)
        return link

    async def peer_dead(self, peer: WorkerRef) -> None:
        """The peer's process has ended: end its hand-offs and forget it."""
        self._pace.forget(peer)
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

    def _ask(self, push: Push) -> None:
        asked_s = self._clock()
        if _body(push).num_pushes:
            self._last_asked_s[push.notice.handoff_id] = asked_s
        self._start(self._credit.add(AskedPush(push, asked_s)))

    def _start(self, pushes: Iterable[AskedPush]) -> None:
        for asked in pushes:
            self._tasks.spawn(self._push(asked.push, asked.asked_s))

    async def _push(self, push: Push, asked_s: float) -> None:
        handoff_id = push.notice.handoff_id
        notice = await self._encode(push)
        posted_s = self._clock()
        # A hand-off that was stopped while this waited for its turn needs it no more.
        delivered = self._sessions.source.is_open(handoff_id) and await self._post(push, notice)
        settled_s = self._clock()
        if delivered:
            self._pace.pushed(push.peer, len(push.source_blocks), settled_s - posted_s)
        exposed_s = settled_s - max(asked_s, self._last_asked_s.get(handoff_id, settled_s))
        report = PushReport(
            len(push.source_blocks), delivered, posted_s - asked_s, settled_s - posted_s, max(0.0, exposed_s)
        )
        self.listener.pushed(report)
        self.perform(self._sessions.source.push_settled(handoff_id, _body(push).sequence, delivered=delivered))
        self._start(self._credit.settled(push))

    async def _encode(self, push: Push) -> bytes:
        if self._checksums is None or not push.source_blocks:
            return encode_notice(push.notice)
        return encode_notice(push.notice, await asyncio.to_thread(self._checksums.of, push.source_blocks))

    async def _post(self, push: Push, notice: bytes) -> bool:
        try:
            await self._transport.push(push.peer, push.source_blocks, push.target_blocks, notice)
        except (TransferFailed, WorkerLost) as error:
            log_state(
                logger,
                logging.WARNING,
                handoff_id=push.notice.handoff_id,
                peer=push.peer,
                state="push failed",
                reason=str(error),
            )
            return False
        return True

    async def _notify(self, effect: Notify) -> None:
        try:
            await self._transport.notify(effect.peer, encode_notice(effect.notice))
        except WorkerLost:
            self._peer_lost(effect.peer)

    def _notice(self, sender: WorkerRef, payload: bytes) -> None:
        decoded = decode_notice(payload)
        if decoded is None:
            log_state(logger, logging.WARNING, peer=sender, state="notice dropped", num_bytes=len(payload))
            return
        notice, checksums = decoded
        pages = self._sessions.target.pages(sender, notice) if self._checksums is not None and checksums else ()
        if pages:
            self._tasks.spawn(self._verify(sender, notice, pages, checksums))
        else:
            self.perform(self._sessions.notice(sender, notice, self._clock()))

    async def _verify(
        self, sender: WorkerRef, notice: HandoffNotice, pages: tuple[int, ...], checksums: tuple[int, ...]
    ) -> None:
        """While it reads, the pages may become another's: the sessions then ignore what it found."""
        assert self._checksums is not None
        start_s = self._clock()
        num_intact = await asyncio.to_thread(self._checksums.num_intact, pages, checksums)
        target = self._sessions.target
        bad = num_intact < len(pages) and target.damaged(sender, notice, num_intact)
        if bad:
            log_state(
                logger,
                logging.ERROR,
                handoff_id=notice.handoff_id,
                peer=sender,
                state="damaged",
                block=pages[num_intact],
            )
        self.listener.verified(self._clock() - start_s, not bad)
        self.perform(self._sessions.notice(sender, notice, self._clock()))

    def _source_ended(self, outcome: SourceEnded) -> None:
        last_asked_s = self._last_asked_s.pop(outcome.handoff_id, None)
        if outcome.landed and last_asked_s is not None:
            self.listener.landed(self._clock() - last_asked_s)
        self._on_outcome(outcome)

    def _peer_lost(self, peer: WorkerRef) -> None:
        self.perform(self._sessions.peer_lost(peer, self._clock()))
        self.listener.peer_lost(peer)


def _body(push: Push) -> BlocksPushed:
    assert isinstance(push.notice.body, BlocksPushed)
    return push.notice.body
