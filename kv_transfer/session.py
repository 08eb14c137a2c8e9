"""Both sides of every KV hand-off, without clocks or sockets: told what happened and when, they say what to do.

The life of one hand-off (states: core/handoff.py):
1. The target takes blocks and makes a ticket: from then on a write may come, so its session is MOVING.
2. The source opens a session on the ticket and renews the target's lease while it computes.
3. Each finished run of blocks becomes a push; the notice that follows its bytes carries generation and sequence.
4. When every push of the last notice's count is in, the target has LANDED and says so; the source frees.
5. Anything else ends in STOPPING: the target locks its blocks and asks the source to stop until the source says
   Quiet, every push has come after all, or the source is dead and its last writes had time to arrive.

Every notice may be lost, late or doubled: leases end what lost ones would leave, generations refuse late ones,
sequences make doubled ones harmless.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import assert_never

from core.handoff import (
    BlocksPushed,
    HandoffNotice,
    HandoffTicket,
    Landed,
    PushPrefix,
    Quiet,
    Renew,
    StopPushing,
)
from core.identity import BlockHash
from core.membership import WorkerRef
from kv_transfer.effects import Blocks, Effect, LeaseConfig, LoadFailurePolicy
from kv_transfer.source import SourceSide
from kv_transfer.target import TargetSide


class HandoffSessions:
    """Both sides of one worker, behind one door for notices, peers and time.

    find_cached: blocks of the leading run of these hashes held here (`BlockPool.match`).
    push_bound_s: the longest that pushing so many blocks to a peer should take (`TransferPace.bound_s`).
    """

    def __init__(
        self,
        me: WorkerRef,
        blocks: Blocks,
        lease: LeaseConfig,
        find_cached: Callable[[Sequence[BlockHash]], list[int]],
        push_bound_s: Callable[[WorkerRef, int], float],
        load_failure: LoadFailurePolicy = LoadFailurePolicy.RECOMPUTE,
    ) -> None:
        self.source = SourceSide(blocks, lease, push_bound_s)
        self.target = TargetSide(me, blocks, lease, load_failure)
        self._find_cached = find_cached

    def __len__(self) -> int:
        """Hand-offs that are not over."""
        return len(self.source) + len(self.target)

    def notice(self, sender: WorkerRef, notice: HandoffNotice, now: float) -> list[Effect]:
        """What a peer said."""
        match notice.body:
            case Landed() | StopPushing():
                return self.source.notice(sender, notice)
            case BlocksPushed() | Quiet() | Renew():
                return self.target.notice(sender, notice, now)
            case PushPrefix(block_hashes, block_ids):
                cached = self._find_cached(block_hashes)[: len(block_ids)]
                pages = block_ids[: len(cached)]
                ticket = HandoffTicket(notice.handoff_id, sender, notice.generation, 0, pages)
                return self.source.push_prefix(ticket, cached, now)
            case _:
                assert_never(notice.body)

    def peer_lost(self, peer: WorkerRef, now: float) -> list[Effect]:
        return [*self.source.peer_lost(peer), *self.target.peer_lost(peer, now)]

    def peer_dead(self, peer: WorkerRef, now: float) -> list[Effect]:
        return [*self.source.peer_lost(peer), *self.target.peer_dead(peer, now)]

    def tick(self, now: float) -> list[Effect]:
        return [*self.source.tick(now), *self.target.tick(now)]
