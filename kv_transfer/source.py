"""The side of a hand-off that pushes. Without clock or socket; the life of a hand-off: kv_transfer/session.py."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
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
    Renew,
    StopPushing,
    next_state,
)
from core.membership import WorkerRef
from kv_transfer.effects import Blocks, Effect, LeaseConfig, Notify, Push, SourceEnded

MAX_OVER: Final = 100_000  # hand-offs remembered as over, so that a late or doubled ticket is not opened again


@dataclass(slots=True)
class _Outgoing:
    ticket: HandoffTicket
    renew_at_s: float
    landed_by_s: float | None = None  # set with the last push: Landed must come before
    state: HandoffState = HandoffState.PLANNED
    next_block: int = 0  # index in the prompt of the first block not pushed yet
    num_pushes: int = 0
    in_flight: dict[int, tuple[int, ...]] = field(default_factory=dict)  # sequence -> our blocks

    @property
    def active(self) -> bool:
        """Neither stopping nor over."""
        return self.state in (HandoffState.RESERVED, HandoffState.MOVING)

    def move(self, event: HandoffEvent) -> None:
        self.state = next_state(self.ticket.handoff_id, self.state, event)


class SourceSide:
    """Every hand-off in which this worker pushes."""

    def __init__(
        self,
        blocks: Blocks,
        lease: LeaseConfig,
        push_bound_s: Callable[[WorkerRef, int], float],
    ) -> None:
        self._blocks = blocks
        self._lease = lease
        self._push_bound_s = push_bound_s
        self._open: dict[str, _Outgoing] = {}
        self._over: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def is_open(self, handoff_id: str) -> bool:
        """True while pushes may be asked for."""
        session = self._open.get(handoff_id)
        return session is not None and session.active

    def open(self, ticket: HandoffTicket, now: float) -> list[Effect]:
        """Accept a ticket. One whose hand-off is over, or was stopped before it came, is answered Quiet."""
        if ticket.handoff_id in self._open:
            raise InvariantBroken(f"handoff {ticket.handoff_id} opened twice")
        if ticket.handoff_id in self._over:
            return [self._notify(ticket, Quiet("over before it started"))]
        session = _Outgoing(ticket, now + self._lease.renew_s, next_block=ticket.first_block)
        session.move(HandoffEvent.BLOCKS_RESERVED)
        self._open[ticket.handoff_id] = session
        return [self._notify(ticket, Renew())]

    def blocks_ready(
        self,
        handoff_id: str,
        block_table: Sequence[int],
        num_ready: int,
        now: float,
        *,
        last: bool,
        first_tokens: tuple[int, ...] = (),
    ) -> list[Effect]:
        """Blocks [0, num_ready) of the prompt are computed and stand in `block_table`: push the ones not pushed yet.

        last: nothing follows; a notice goes out even when no block is left to push.
        """
        session = self._open[handoff_id]
        if not session.active or session.landed_by_s is not None:
            return []
        ticket, first = session.ticket, session.next_block
        end = min(num_ready, ticket.first_block + len(ticket.block_ids))
        if end <= first and not last:
            return []
        ours = tuple(block_table[first:end])
        theirs = ticket.block_ids[first - ticket.first_block : max(first, end) - ticket.first_block]
        sequence, session.num_pushes = session.num_pushes, session.num_pushes + 1
        body = BlocksPushed(sequence, first, len(ours), session.num_pushes if last else 0, first_tokens)
        if session.state is HandoffState.RESERVED:
            session.move(HandoffEvent.WRITES_POSSIBLE)
        session.next_block = max(first, end)
        session.in_flight[sequence] = ours
        if last:
            under_way = sum(map(len, session.in_flight.values()))
            bound_s = max(self._lease.landed_timeout_s, self._push_bound_s(ticket.target, under_way))
            session.landed_by_s = now + bound_s
        self._blocks.hold(ours)
        return [Push(ticket.target, ours, theirs, HandoffNotice(handoff_id, ticket.generation, body))]

    def push_settled(self, handoff_id: str, sequence: int, *, delivered: bool) -> list[Effect]:
        """Our side of a push is settled: its blocks may be freed. A push that failed ends the hand-off."""
        session = self._open[handoff_id]
        self._blocks.release(session.in_flight.pop(sequence))
        if not delivered and session.state is HandoffState.MOVING:
            session.move(HandoffEvent.CANCELLED)
        return self._settle(session, "stopped" if delivered else "a push failed")

    def notice(self, sender: WorkerRef, notice: HandoffNotice) -> list[Effect]:
        """Landed or StopPushing from a target. One that names another target or generation is refused."""
        session = self._open.get(notice.handoff_id)
        if session is None:
            if not isinstance(notice.body, StopPushing):
                return []
            self._remember_over(notice.handoff_id)
            return [Notify(sender, HandoffNotice(notice.handoff_id, notice.generation, Quiet("not open here")))]
        if session.ticket.target != sender or session.ticket.generation != notice.generation:
            return []
        if isinstance(notice.body, StopPushing):
            return self.cancel(notice.handoff_id)
        if isinstance(notice.body, Landed) and session.state is HandoffState.MOVING:
            session.move(HandoffEvent.VERIFIED)
            return self._settle(session, "landed")
        return []

    def push_prefix(self, ticket: HandoffTicket, cached_blocks: Sequence[int], now: float) -> list[Effect]:
        """Push `cached_blocks`, the leading run of what a peer asked for, to the ticket's first pages."""
        if ticket.handoff_id in self._open:
            return []  # doubled on the way
        if not cached_blocks:
            self._remember_over(ticket.handoff_id)
            return [self._notify(ticket, Quiet("not cached here"))]
        effects = self.open(ticket, now)
        if not self.is_open(ticket.handoff_id):
            return effects
        return effects + self.blocks_ready(ticket.handoff_id, cached_blocks, len(cached_blocks), now, last=True)

    def cancel(self, handoff_id: str) -> list[Effect]:
        """Push no more. The target hears Quiet as soon as no push is under way. Unknown ids are ignored."""
        session = self._open.get(handoff_id)
        if session is None:
            return []
        if session.active:
            session.move(HandoffEvent.CANCELLED)
        return self._settle(session, "cancelled")

    def peer_lost(self, peer: WorkerRef) -> list[Effect]:
        """A target cannot be reached: its hand-offs end; references stay until their pushes settle."""
        effects: list[Effect] = []
        for session in [item for item in self._open.values() if item.ticket.target == peer]:
            effects += self.cancel(session.ticket.handoff_id)
        return effects

    def tick(self, now: float) -> list[Effect]:
        """Renew what is open; end what has waited too long for Landed."""
        effects: list[Effect] = []
        for session in list(self._open.values()):
            if not session.active:
                continue
            if session.landed_by_s is not None and now >= session.landed_by_s:
                effects += self.cancel(session.ticket.handoff_id)
            elif now >= session.renew_at_s:
                session.renew_at_s = now + self._lease.renew_s
                effects.append(self._notify(session.ticket, Renew()))
        return effects

    def _settle(self, session: _Outgoing, reason: str) -> list[Effect]:
        """End the session once nothing is under way: LANDED -> RELEASED, STOPPING -> ABORTED."""
        handoff_id = session.ticket.handoff_id
        if session.in_flight or session.active:
            return []
        self._remember_over(handoff_id)
        del self._open[handoff_id]
        if session.state is HandoffState.LANDED:
            session.move(HandoffEvent.FREED)
            return [SourceEnded(handoff_id, landed=True)]
        if session.state is HandoffState.STOPPING:
            session.move(HandoffEvent.TRANSPORT_QUIET)
        return [self._notify(session.ticket, Quiet(reason)), SourceEnded(handoff_id, landed=False)]

    def _remember_over(self, handoff_id: str) -> None:
        """The pages of a hand-off that is over belong to others: its ticket must never be opened again."""
        self._over[handoff_id] = None
        if len(self._over) > MAX_OVER:
            self._over.popitem(last=False)

    def _notify(self, ticket: HandoffTicket, body: Quiet | Renew) -> Notify:
        return Notify(ticket.target, HandoffNotice(ticket.handoff_id, ticket.generation, body))
