"""What every runner refuses before it computes."""

from __future__ import annotations

from core.errors import InvariantBroken
from engine.step import SequenceSlice


def require_inside(
    item: SequenceSlice, block_size: int, num_blocks: int, max_context_tokens: int, vocab_size: int
) -> None:
    """Raise InvariantBroken where a slice would read or write outside its own blocks, the pool or the tables."""
    require_covered(item, block_size, max_context_tokens)
    if min(item.block_table) < 0 or max(item.block_table) >= num_blocks:
        raise InvariantBroken(f"request {item.request_id}: a block id lies outside the pool of {num_blocks}")
    if min(item.token_ids) < 0 or max(item.token_ids) >= vocab_size:
        raise InvariantBroken(f"request {item.request_id}: a token id lies outside the vocabulary")


def require_covered(item: SequenceSlice, block_size: int, max_context_tokens: int) -> None:
    """Raise InvariantBroken where a slice is empty, longer than its blocks, or beyond the model's context."""
    if not item.token_ids or item.start < 0:
        raise InvariantBroken(f"request {item.request_id}: empty slice, or start {item.start} below 0")
    if len(item.block_table) * block_size < item.end:
        raise InvariantBroken(
            f"request {item.request_id}: {len(item.block_table)} blocks do not cover {item.end} tokens"
        )
    if item.end > max_context_tokens:
        raise InvariantBroken(f"request {item.request_id}: {item.end} tokens exceed the model's context")
