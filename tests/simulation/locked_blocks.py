"""What a target's hand-offs have locked: where a write may come."""

from __future__ import annotations

from kv_transfer.target import TargetSide


def locked_blocks(target: TargetSide, handoff_id: str) -> tuple[int, ...]:
    """None when the hand-off is not open."""
    session = target._open.get(handoff_id)
    return session.ticket.block_ids if session else ()


def no_bound(_peer: object, _num_blocks: int) -> float:
    """Of how long a push should take."""
    return 0.0
