"""The life of one KV hand-off as a table that both sides obey.

| state    | on the source                                | on the target                                      |
|----------|----------------------------------------------|----------------------------------------------------|
| PLANNED  | nothing held                                 | nothing held                                       |
| RESERVED | has the ticket; nothing posted               | holds blocks; nobody was told where they are       |
| MOVING   | a reference on each block under a push       | blocks locked: a write may come at any moment      |
| LANDED   | bytes verified by the target; may free       | the request owns the blocks                        |
| RELEASED | end: nothing held                            | end: the session holds nothing                     |
| STOPPING | pushes may be under way: references stay     | quarantine: locked until the source is quiet       |
| ABORTED  | end: nothing held                            | end: blocks freed as dirty                         |

Cancellation, drain, rejection, lease expiry and a peer's death are all `CANCELLED`; nothing has a path of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from core.errors import InvariantBroken
from core.identity import BlockHash
from core.membership import WorkerRef


class HandoffState(StrEnum):
    PLANNED = "planned"
    RESERVED = "reserved"
    MOVING = "moving"
    LANDED = "landed"
    RELEASED = "released"
    STOPPING = "stopping"
    ABORTED = "aborted"


class HandoffEvent(StrEnum):
    BLOCKS_RESERVED = "blocks_reserved"
    WRITES_POSSIBLE = "writes_possible"  # target: the ticket left this process; source: a push was posted
    VERIFIED = "verified"  # target: every push counted; source: the target said so
    FREED = "freed"
    CANCELLED = "cancelled"
    TRANSPORT_QUIET = "transport_quiet"  # no write of this hand-off is or will be under way


_S, _E = HandoffState, HandoffEvent

NEXT: Final[dict[tuple[HandoffState, HandoffEvent], HandoffState]] = {
    (_S.PLANNED, _E.BLOCKS_RESERVED): _S.RESERVED,
    (_S.PLANNED, _E.CANCELLED): _S.ABORTED,
    (_S.RESERVED, _E.WRITES_POSSIBLE): _S.MOVING,
    (_S.RESERVED, _E.CANCELLED): _S.ABORTED,
    (_S.MOVING, _E.VERIFIED): _S.LANDED,
    (_S.MOVING, _E.CANCELLED): _S.STOPPING,
    (_S.LANDED, _E.FREED): _S.RELEASED,
    (_S.STOPPING, _E.TRANSPORT_QUIET): _S.ABORTED,
}


def next_state(handoff_id: str, state: HandoffState, event: HandoffEvent) -> HandoffState:
    """The state after `event`. Raises InvariantBroken for a pair that the table does not list."""
    try:
        return NEXT[state, event]
    except KeyError:
        raise InvariantBroken(f"handoff {handoff_id}: {event} in state {state} is not in the table") from None


@dataclass(frozen=True, slots=True)
class HandoffTicket:
    """Where a hand-off's bytes go: made by the target, used by the source.

    generation: the target's fence; notices that carry another one are refused.
    first_block: index in the prompt of the first block wanted; those before it were hits on the target.
    block_ids: the target's blocks, in prompt order from `first_block`.
    """

    handoff_id: str
    target: WorkerRef
    generation: int
    first_block: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlocksPushed:
    """Source to target, attached to a push: blocks [first_block, first_block + num_blocks) of the prompt are in.

    sequence: pushes of one hand-off count from 0. num_pushes: on the last push, how many there were; else 0.
    first_tokens: on the last push of a prefill, the token that each choice drew from the prompt.
    """

    sequence: int
    first_block: int
    num_blocks: int
    num_pushes: int = 0
    first_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Landed:
    """Target to source: every push arrived and was verified."""


@dataclass(frozen=True, slots=True)
class StopPushing:
    """Target to source: push no more, and say Quiet when nothing of yours can still arrive."""


@dataclass(frozen=True, slots=True)
class Quiet:
    """Source to target: no write of mine is or will be under way for this hand-off."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Renew:
    """Source to target: still at it, keep the lease."""


@dataclass(frozen=True, slots=True)
class PushPrefix:
    """Target to a holder of cached blocks: push these to my pages. Unknown blocks shorten the run."""

    block_hashes: tuple[BlockHash, ...]
    block_ids: tuple[int, ...]


NoticeBody = BlocksPushed | Landed | StopPushing | Quiet | Renew | PushPrefix


@dataclass(frozen=True, slots=True)
class HandoffNotice:
    """What two workers tell each other; each kind may be lost, late or doubled without harm."""

    handoff_id: str
    generation: int
    body: NoticeBody
