"""What the two sides of a hand-off need, and what they ask of their driver."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from core.handoff import HandoffNotice
from core.membership import WorkerRef


@dataclass(frozen=True, slots=True)
class LeaseConfig:
    """All in seconds.

    lease_s: a target that hears nothing of a hand-off for so long ends it. renew_s: how often a source renews.
    settle_s: how long after a peer's death its last writes may still arrive. stop_retry_s: how often a stopping
    target asks again. landed_timeout_s: how long a source waits at least for Landed after its last push; longer where
    what is under way may take longer.
    """

    lease_s: float = 10.0
    renew_s: float = 1.0
    settle_s: float = 1.0
    stop_retry_s: float = 1.0
    landed_timeout_s: float = 10.0


class LoadFailurePolicy(StrEnum):
    """What a target does with a hand-off of which a block did not arrive whole."""

    RECOMPUTE = "recompute"  # keep what came before the first bad block, compute the rest again
    FAIL = "fail"  # end it: what is left of the request is planned again


class Blocks(Protocol):
    """What a hand-off does to the pool (engine/block_pool.py). What it holds it releases itself; a ticket's blocks come
    with a reference, which it releases or hands on as the hand-off ends. What may still be written is in quarantine
    until it ends that."""

    def hold(self, blocks: Iterable[int]) -> None: ...

    def release(self, blocks: Sequence[int]) -> None: ...

    def quarantine(self, blocks: Iterable[int]) -> None: ...

    def end_quarantine(self, blocks: Iterable[int]) -> None: ...


@dataclass(frozen=True, slots=True)
class Push:
    """Write blocks to the peer with this notice; answer with `SourceSide.push_settled` when our side is settled."""

    peer: WorkerRef
    source_blocks: tuple[int, ...]
    target_blocks: tuple[int, ...]
    notice: HandoffNotice


@dataclass(frozen=True, slots=True)
class Notify:
    """Deliver a notice. Nobody answers: who needs to know whether it arrived waits for a notice, or for a lease."""

    peer: WorkerRef
    notice: HandoffNotice


@dataclass(frozen=True, slots=True)
class SourceEnded:
    """The source side of a hand-off is over and holds nothing."""

    handoff_id: str
    landed: bool


@dataclass(frozen=True, slots=True)
class TargetLanded:
    """`blocks` of the ticket, in order, hold verified KV; their reference is now the receiver's.

    A prefix push may cover fewer blocks than the ticket: the rest were released. num_intact: leading blocks that
    arrived whole; those after it are the receiver's too, but dirty: to be computed again before they are read.
    """

    handoff_id: str
    blocks: tuple[int, ...]
    first_tokens: tuple[int, ...]
    num_intact: int


@dataclass(frozen=True, slots=True)
class TargetFailed:
    """The hand-off will not land. Its blocks are locked or already free; whoever waits for it must plan again."""

    handoff_id: str
    reason: str


Effect = Push | Notify | SourceEnded | TargetLanded | TargetFailed
