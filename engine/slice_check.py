"""What every runner refuses before it computes."""

from __future__ import annotations

from collections.abc import Container

from core.errors import InvariantBroken
from engine.step import SequenceSlice, StepPlan


def require_computable(
    plan: StepPlan,
    block_size: int,
    num_blocks: int,
    max_context_tokens: int,
    vocab_size: int,
    adapters: Container[str],
) -> None:
    """Raise InvariantBroken where a step would touch what is not there. adapters: digests of those that are loaded."""
    for item in plan.slices:
        require_inside(item, block_size, num_blocks, max_context_tokens, vocab_size)
        if item.adapter_digest and item.adapter_digest not in adapters:
            raise InvariantBroken(f"request {item.request_id}: its adapter is not loaded")
    require_copies(plan, num_blocks)


def require_copies(plan: StepPlan, num_blocks: int) -> None:
    """Raise InvariantBroken where a copy is not inside the pool."""
    for source, target in plan.copies:
        if not (0 <= source < num_blocks and 0 <= target < num_blocks):
            raise InvariantBroken(f"copy of block {source} to {target} in a pool of {num_blocks}")


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
