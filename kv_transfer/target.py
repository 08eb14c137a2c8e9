"""The side of a hand-off that is written to. Without clock or socket; its life: kv_transfer/session.py."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from core.errors import InvariantBroken
from core.handoff import (
    BlocksPushed,
    HandoffEvent,
    HandoffNotice,
    HandoffState,
    HandoffTicket,
    Landed,
    Quiet,
    StopPushing,
    next_state,
)
from core.membership import WorkerRef
from kv_transfer.effects import (
    Blocks,
    Effect,
    LeaseConfig,
    LoadFailurePolicy,
    Notify,
    TargetFailed,
    TargetLanded,
)

MAX_DEAD: Final = 1024  # deaths remembered, so that a reserve that names a dead source still ends


@dataclass(slots=True)
class _Incoming:
    ticket: HandoffTicket
    source: WorkerRef
    may_be_short: bool
    deadline_s: float
    state: HandoffState = HandoffState.PLANNED
    pushes: dict[int, BlocksPushed] = field(default_factory=dict)
    num_pushes: int = 0
    first_tokens: tuple[int, ...] = ()
    damaged_from: int | None = None  # index in the prompt of the first block that did not arrive whole
    ask_again_s: float = 0.0
    quiet_at_s: float | None = None  # the source is dead: quiet from then on

    def move(self, event: HandoffEvent) -> None:
        self.state = next_state(self.ticket.handoff_id, self.state, event)

    @property
    def complete(self) -> bool:
        """Every push that the source made has come, so nothing of it can still arrive."""
        return self.num_pushes > 0 and len(self.pushes) == self.num_pushes

    def covered(self) -> int:
        """Leading blocks of the ticket that the pushes cover without a gap; -1 when they do not fit together."""
        at = self.ticket.first_block
        for sequence in sorted(self.pushes):
            push = self.pushes[sequence]
            if push.first_block != at:
                return -1
            at += push.num_blocks
        return at - self.ticket.first_block

    def num_intact(self, covered: int) -> int:
        """How many of the `covered` leading blocks come before the first bad one."""
        if self.damaged_from is None:
            return covered
        return min(covered, self.damaged_from - self.ticket.first_block)


class TargetSide:
    """Every hand-off in which a peer pushes into this worker."""

    def __init__(
        self,
        me: WorkerRef,
        blocks: Blocks,
        lease: LeaseConfig,
        load_failure: LoadFailurePolicy = LoadFailurePolicy.RECOMPUTE,
    ) -> None:
        self._me = me
        self._blocks = blocks
        self._lease = lease
        self._load_failure = load_failure
        self._open: dict[str, _Incoming] = {}
        self._dead: deque[WorkerRef] = deque(maxlen=MAX_DEAD)
        self._generation = 0

    def __len__(self) -> int:
        return len(self._open)

    def reserve(
        self,
        handoff_id: str,
        source: WorkerRef,
        first_block: int,
        blocks: tuple[int, ...],
        now: float,
        *,
        may_be_short: bool = False,
    ) -> HandoffTicket:
        """Lock `blocks` (one reference each, now the session's) for `source` to write, and make the ticket.

        may_be_short: a push of fewer leading blocks than the ticket's also lands (a prefix push).
        """
        if handoff_id in self._open:
            raise InvariantBroken(f"handoff {handoff_id} reserved twice")
        self._generation += 1
        ticket = HandoffTicket(handoff_id, self._me, self._generation, first_block, blocks)
        session = _Incoming(ticket, source, may_be_short, now + self._lease.lease_s)
        session.move(HandoffEvent.BLOCKS_RESERVED)
        session.move(HandoffEvent.WRITES_POSSIBLE)
        if source in self._dead:  # it died before the router knew: end the hand-off at the next tick
            session.deadline_s = now
            session.quiet_at_s = now + self._lease.settle_s
        self._open[handoff_id] = session
        return ticket

    def notice(self, sender: WorkerRef, notice: HandoffNotice, now: float) -> list[Effect]:
        """BlocksPushed, Quiet or Renew from a source. Anything that names another sender or generation is refused."""
        session = self._fenced(sender, notice)
        if session is None:
            return []
        session.deadline_s = now + self._lease.lease_s
        match notice.body:
            case BlocksPushed() as push:
                return self._pushed(session, push, now)
            case Quiet(reason):
                return [*self._stop(session, f"source ended: {reason}", now), *self._quiet(session)]
            case _:
                return []

    def pages(self, sender: WorkerRef, notice: HandoffNotice) -> tuple[int, ...]:
        """The blocks that a BlocksPushed says were written, to be checked; none when it is not of an open hand-off."""
        session, body = self._fenced(sender, notice), notice.body
        if session is None or session.state is not HandoffState.MOVING or not isinstance(body, BlocksPushed):
            return ()
        start = max(0, body.first_block - session.ticket.first_block)
        return session.ticket.block_ids[start : start + body.num_blocks]

    def damaged(self, sender: WorkerRef, notice: HandoffNotice, num_intact: int) -> bool:
        """Of a push, only the first `num_intact` blocks arrived whole; tell before its notice. False: not open here."""
        session, body = self._fenced(sender, notice), notice.body
        if session is None or not isinstance(body, BlocksPushed):
            return False
        first_bad = max(body.first_block, session.ticket.first_block) + num_intact
        session.damaged_from = min(first_bad, session.damaged_from if session.damaged_from is not None else first_bad)
        return True

    def cancel(self, handoff_id: str, reason: str, now: float) -> list[Effect]:
        """The request is over or moved elsewhere. Unknown ids are ignored."""
        session = self._open.get(handoff_id)
        return self._stop(session, reason, now) if session else []

    def peer_lost(self, peer: WorkerRef, now: float) -> list[Effect]:
        """A source cannot be reached. It may still live, and write: its hand-offs stop, their blocks stay locked."""
        effects: list[Effect] = []
        for session in [item for item in self._open.values() if item.source == peer]:
            effects += self._stop(session, f"source {peer} is lost", now)
        return effects

    def peer_dead(self, peer: WorkerRef, now: float) -> list[Effect]:
        """A source's process is known to have ended: quiet once what it wrote last had time to arrive."""
        self._dead.append(peer)
        effects = self.peer_lost(peer, now)
        for session in self._open.values():
            if session.source == peer and session.quiet_at_s is None:
                session.quiet_at_s = now + self._lease.settle_s
        return effects

    def tick(self, now: float) -> list[Effect]:
        """End expired leases, ask stopping sources again, free what is quiet."""
        effects: list[Effect] = []
        for session in list(self._open.values()):
            if session.state is HandoffState.MOVING:
                if now >= session.deadline_s:
                    effects += self._stop(session, "lease expired", now)
            elif session.quiet_at_s is not None:
                if now >= session.quiet_at_s:
                    effects += self._quiet(session)
            elif now >= session.ask_again_s:
                session.ask_again_s = now + self._lease.stop_retry_s
                effects.append(self._notify(session, StopPushing()))
        return effects

    def _fenced(self, sender: WorkerRef, notice: HandoffNotice) -> _Incoming | None:
        """The hand-off that a notice is about, if its source says so under the ticket's generation."""
        session = self._open.get(notice.handoff_id)
        if session is None or session.source != sender or session.ticket.generation != notice.generation:
            return None
        return session

    def _pushed(self, session: _Incoming, push: BlocksPushed, now: float) -> list[Effect]:
        session.pushes[push.sequence] = push
        if push.num_pushes:
            session.num_pushes, session.first_tokens = push.num_pushes, push.first_tokens
        if not session.complete:
            return []
        if session.state is HandoffState.STOPPING:
            return self._quiet(session)
        covered = session.covered()
        wanted = len(session.ticket.block_ids)
        if covered != wanted and not (session.may_be_short and 0 <= covered <= wanted):
            failed = self._stop(session, f"pushes cover {covered} of {wanted} blocks", now)
            return [*failed, *self._quiet(session)]
        intact = session.num_intact(covered)
        if intact < covered and self._load_failure is LoadFailurePolicy.FAIL:
            failed = self._stop(session, f"block {session.ticket.first_block + intact} did not arrive whole", now)
            return [*failed, *self._quiet(session)]
        return self._land(session, intact if session.may_be_short else covered, intact)

    def _land(self, session: _Incoming, covered: int, intact: int) -> list[Effect]:
        ticket = session.ticket
        session.move(HandoffEvent.VERIFIED)
        session.move(HandoffEvent.FREED)
        del self._open[ticket.handoff_id]
        self._blocks.release(ticket.block_ids[covered:])
        return [
            TargetLanded(ticket.handoff_id, ticket.block_ids[:covered], session.first_tokens, intact),
            self._notify(session, Landed()),
        ]

    def _stop(self, session: _Incoming, reason: str, now: float) -> list[Effect]:
        """MOVING -> STOPPING: lock the blocks, tell whoever waits, ask the source to stop."""
        if session.state is not HandoffState.MOVING:
            return []
        session.move(HandoffEvent.CANCELLED)
        self._blocks.quarantine(session.ticket.block_ids)
        session.ask_again_s = now + self._lease.stop_retry_s
        return [TargetFailed(session.ticket.handoff_id, reason), self._notify(session, StopPushing())]

    def _quiet(self, session: _Incoming) -> list[Effect]:
        """STOPPING -> ABORTED: no write can come; the blocks are free, and dirty."""
        if session.state is HandoffState.STOPPING:
            session.move(HandoffEvent.TRANSPORT_QUIET)
            del self._open[session.ticket.handoff_id]
            self._blocks.end_quarantine(session.ticket.block_ids)
        return []

    def _notify(self, session: _Incoming, body: Landed | StopPushing) -> Notify:
        ticket = session.ticket
        return Notify(session.source, HandoffNotice(ticket.handoff_id, ticket.generation, body))
