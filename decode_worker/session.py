"""What a decode worker does for each request, without clock or socket.

A request whose prompt is prefilled elsewhere:
1. WAITING: no room in the pool yet; the scheduler says who is next (engine/waiting_line.py). For a bounded time, but a
   stream that goes on keeps its place, as one that is preempted does.
2. RESERVED: prefix hits are held, the other blocks are locked for the source; the ticket went to the router.
3. RUNNING: the KV landed, once for all choices; the scheduler draws tokens from position 1 on.
A request without a prefill worker is RUNNING at once and is prefilled here in chunks.

Mirror image: prefill_worker/session.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from core.errors import BadRequest
from core.membership import WorkerRef
from core.messages import Refused, RefuseReason, Reserved
from core.request import GenerateRequest, TokenDelta, WorkUsage
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.step import Progress
from kv_transfer.effects import Effect as KvEffect
from kv_transfer.effects import TargetFailed, TargetLanded
from kv_transfer.session import HandoffSessions

Effect = KvEffect | Reserved | Refused


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """reserve_timeout_s: how long a request without a token may wait for room in the KV pool. block_bytes: of one KV
    block."""

    block_bytes: int
    reserve_timeout_s: float = 30.0


@dataclass(slots=True)
class _Waiting:
    sequence: Sequence
    handoff_id: str
    source: WorkerRef
    deadline_s: float


@dataclass(slots=True)
class _Reserved:
    sequence: Sequence
    hits: list[int]


class DecodeSession:
    """All requests of one decode worker."""

    def __init__(self, config: DecodeConfig, scheduler: Scheduler, handoffs: HandoffSessions) -> None:
        self._config = config
        self._scheduler = scheduler
        self._handoffs = handoffs
        self._waiting: dict[str, _Waiting] = {}  # by request id
        self._reserved: dict[str, _Reserved] = {}  # by handoff id
        self._handoff_of: dict[str, str] = {}  # request id -> handoff id, while reserved
        self._landed_blocks: dict[str, int] = {}  # request id -> blocks received, until its first delta

    def __len__(self) -> int:
        """Requests that are waiting or reserved; running ones are the scheduler's."""
        return len(self._waiting) + len(self._reserved)

    def unbegun(self) -> list[str]:
        """Requests of which nothing is computed, and that hold no blocks for a source to write."""
        return [*self._waiting, *self._scheduler.unbegun()]

    def start(self, request: GenerateRequest) -> list[Effect]:
        """Prefill and decode here."""
        try:
            self._scheduler.add(self._scheduler.new_sequence(request))
        except BadRequest as error:
            return [Refused(request.request_id, RefuseReason.BAD_REQUEST, str(error))]
        return []

    def reserve(self, request: GenerateRequest, handoff_id: str, source: WorkerRef, now: float) -> list[Effect]:
        """Take blocks for the prompt, or wait for room."""
        try:
            sequence = self._scheduler.new_sequence(request)
        except BadRequest as error:
            return [Refused(request.request_id, RefuseReason.BAD_REQUEST, str(error))]
        deadline_s = math.inf if request.output_token_ids else now + self._config.reserve_timeout_s
        self._waiting[request.request_id] = _Waiting(sequence, handoff_id, source, deadline_s)
        self._scheduler.await_room(sequence)
        return self.serve_waiting(now)

    def serve_waiting(self, now: float) -> list[Effect]:
        """Reserve for those who wait, as far as the scheduler has room for them."""
        effects: list[Effect] = []
        while (taken := self._scheduler.reserve_next()) is not None:
            sequence = taken.sequence
            item = self._waiting.pop(sequence.request_id)
            num_hits = len(taken.hits)
            sequence.num_cached_prompt = num_hits * self._scheduler.limits.block_size
            self._reserved[item.handoff_id] = _Reserved(sequence, taken.hits)
            self._handoff_of[sequence.request_id] = item.handoff_id
            ticket = self._handoffs.target.reserve(item.handoff_id, item.source, num_hits, tuple(taken.fresh), now)
            effects.append(Reserved(sequence.request_id, ticket))
        return effects

    def landed(self, outcome: TargetLanded) -> list[Effect]:
        """The prompt's KV is here and verified: decode from the next step on."""
        reserved = self._reserved.pop(outcome.handoff_id)
        sequence = reserved.sequence
        del self._handoff_of[sequence.request_id]
        num_tokens, num_choices = len(outcome.first_tokens), sequence.num_choices
        if num_tokens != num_choices:
            self._scheduler.end_reservation(sequence)
            self._scheduler.pool.release([*reserved.hits, *outcome.blocks])
            message = f"landed with {num_tokens} first tokens for {num_choices} choices"
            return [Refused(sequence.request_id, RefuseReason.TRANSFER_FAILED, message)]
        self._landed_blocks[sequence.request_id] = len(outcome.blocks)
        blocks, num_intact = [*reserved.hits, *outcome.blocks], len(reserved.hits) + outcome.num_intact
        if not self._scheduler.add_landed(sequence, blocks, outcome.first_tokens, num_intact):
            del self._landed_blocks[sequence.request_id]
        return []

    def failed(self, outcome: TargetFailed) -> list[Effect]:
        """The KV will not come: what is not locked is free, and the router must plan again."""
        reserved = self._reserved.pop(outcome.handoff_id, None)
        if reserved is None:
            return []
        self._scheduler.end_reservation(reserved.sequence)
        self._scheduler.pool.release(reserved.hits)
        request_id = reserved.sequence.request_id
        del self._handoff_of[request_id]
        return [Refused(request_id, RefuseReason.TRANSFER_FAILED, outcome.reason)]

    def progressed(self, progress: list[Progress]) -> list[TokenDelta]:
        """The tokens of one step."""
        return [self._with_usage(delta) for item in progress for delta in item.deltas]

    def cancel(self, request_id: str, now: float) -> list[Effect]:
        """Free what the request holds, in whatever state it is."""
        self._landed_blocks.pop(request_id, None)
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            self._scheduler.end_reservation(waiting.sequence)
            return []
        handoff_id = self._handoff_of.pop(request_id, None)
        if handoff_id is None:
            self._scheduler.cancel(request_id)
            return []
        reserved = self._reserved.pop(handoff_id)
        self._scheduler.end_reservation(reserved.sequence)
        self._scheduler.pool.release(reserved.hits)
        return list(self._handoffs.target.cancel(handoff_id, "cancelled", now))

    def tick(self, now: float) -> list[Effect]:
        """Refuse those who waited too long for room; serve the others."""
        effects: list[Effect] = []
        for request_id, late in list(self._waiting.items()):
            if now < late.deadline_s:
                continue
            del self._waiting[request_id]
            self._scheduler.end_reservation(late.sequence)
            message = f"no room in the KV pool for {self._config.reserve_timeout_s} s"
            effects.append(Refused(request_id, RefuseReason.NO_BLOCKS, message))
        return effects + self.serve_waiting(now)

    def _with_usage(self, delta: TokenDelta) -> TokenDelta:
        """Add to the first delta what was received for the request."""
        num_blocks = self._landed_blocks.pop(delta.request_id, None)
        if num_blocks is None:
            return delta
        received = replace(
            delta.usage or WorkUsage(),
            kv_blocks_received=num_blocks,
            kv_bytes_received=num_blocks * self._config.block_bytes,
        )
        return replace(delta, usage=received)
