"""Blocks for the next tokens of running sequences: further ones, and copies of those that others refer to.

A sequence never writes into a block that others hold: it gets one of its own first, and the step copies into it before
anything is written. The copy takes over the sequence's reference on its source, so that nobody gets that block before
the step has run. The last holder writes in place.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.block_pool import BlockPool
from engine.sequence import Sequence


class BlockGrowth:
    """What sequences need to go on, and the copies of the step to come."""

    def __init__(self, pool: BlockPool, most: int) -> None:
        """most: blocks that are kept free for each sequence, at most."""
        self._pool = pool
        self._most = most
        self._copies: list[tuple[int, int]] = []

    def needs_block(self, sequence: Sequence) -> bool:
        """The token that a decoding sequence computes next has no block that is its own."""
        return self._must_copy(sequence) or sequence.num_blocks_to(sequence.num_known) > len(sequence.blocks)

    def give(self, sequence: Sequence, fresh: int) -> None:
        """One fresh block, whose reference is now the sequence's, to one that needs it."""
        if self._must_copy(sequence):
            self._copies.append((sequence.blocks[-1], fresh))
            sequence.blocks[-1] = fresh
        else:
            sequence.blocks.append(fresh)

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """(source, target) of all copies since the last call; the references on the sources are now the caller's."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def num_expected(self, holders: Iterable[Sequence]) -> int:
        """Blocks that those who hold some may soon need; to preempt them for want of one later would cost more.

        Choices that share a block count a copy each, though the last to write makes none: so for one step after a fork.
        """
        return sum(item.num_growth_blocks(self._most, must_copy=self._must_copy(item)) for item in holders)

    def _must_copy(self, sequence: Sequence) -> bool:
        """The block that its next token goes into is another choice's too; one whose copy is planned has left it."""
        if not sequence.decoding or sequence.num_computed % sequence.limits.block_size == 0:
            return False
        block = sequence.blocks[-1]
        num_leaving = sum(source == block for source, _target in self._copies)
        return self._pool.num_references(block) - num_leaving > 1
