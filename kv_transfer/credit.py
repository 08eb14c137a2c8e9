"""How much may be on its way to a peer at once, and whose turn it is. Without clock or socket."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from core.membership import WorkerRef
from kv_transfer.effects import Push


@dataclass(frozen=True, slots=True)
class AskedPush:
    """A push, and when it was asked for."""

    push: Push
    asked_s: float

    @property
    def handoff_id(self) -> str:
        return self.push.notice.handoff_id


@dataclass(slots=True)
class _Lane:
    """One peer: what is under way to it, and what waits, by hand-off in the order of their turns."""

    in_flight_bytes: int = 0
    num_in_flight: int = 0
    waiting: OrderedDict[str, deque[AskedPush]] = field(default_factory=OrderedDict)


class PushCredit:
    """Credit for each peer: a push starts when it fits beside what is under way, or when nothing is.

    Hand-offs take turns, a push each, so that a long prompt does not hold up the short ones behind it; the pushes of
    one hand-off keep their order.
    """

    def __init__(self, block_bytes: int, max_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._max_bytes = max_bytes
        self._lanes: dict[WorkerRef, _Lane] = {}

    def add(self, asked: AskedPush) -> list[AskedPush]:
        """A push that is asked for. Returns what starts now."""
        peer = asked.push.peer
        lane = self._lanes.setdefault(peer, _Lane())
        lane.waiting.setdefault(asked.handoff_id, deque()).append(asked)
        return self._start(peer, lane)

    def settled(self, push: Push) -> list[AskedPush]:
        """A push that was started is over. Returns what starts now."""
        lane = self._lanes[push.peer]
        lane.in_flight_bytes -= self._bytes(push)
        lane.num_in_flight -= 1
        return self._start(push.peer, lane)

    def _start(self, peer: WorkerRef, lane: _Lane) -> list[AskedPush]:
        started: list[AskedPush] = []
        while lane.waiting:
            handoff_id, pushes = next(iter(lane.waiting.items()))
            num_bytes = self._bytes(pushes[0].push)
            if lane.num_in_flight and lane.in_flight_bytes + num_bytes > self._max_bytes:
                break
            started.append(pushes.popleft())
            lane.in_flight_bytes += num_bytes
            lane.num_in_flight += 1
            if pushes:
                lane.waiting.move_to_end(handoff_id)
            else:
                del lane.waiting[handoff_id]
        if not lane.num_in_flight:
            del self._lanes[peer]
        return started

    def _bytes(self, push: Push) -> int:
        return len(push.source_blocks) * self._block_bytes
