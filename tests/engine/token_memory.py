"""A runner without a model: its KV pool remembers which token stands in each slot, and checks it at every read.

The next token is a hash of all tokens before it, so a sequence that ever read another one's block, a stale block or a
hole draws differently from its undisturbed run, or raises at once.
"""

from __future__ import annotations

import hashlib
import struct

from core.request import SamplingParams
from engine.block_pool import BlockPool
from engine.step import Drawn, SequenceSlice, StepPlan

VOCAB_SIZE = 1000


class StaleRead(Exception):
    """A slot did not hold the token that the sequence put there."""


class SharedWrite(Exception):
    """A step wrote into a block that another sequence refers to, or copied from one that nobody holds any more."""


class TokenMemory:
    """`run` as ModelRunner's, over the blocks of `pool`, whose references it checks at every write and copy."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self.slots: dict[tuple[int, int], int] = {}
        self.computed_tokens = 0
        self.copied_blocks = 0

    def run(self, plan: StepPlan) -> list[tuple[Drawn, ...]]:
        self._copy(plan)
        for item in plan.slices:  # all writes come before all reads, as in one fused step
            self._require_own(plan, item)
            self._write(item)
            self.computed_tokens += len(item.token_ids)
        return [self._draw(item) for item in plan.slices]

    def _copy(self, plan: StepPlan) -> None:
        self.copied_blocks += len(plan.copies)
        sources, targets = ({copy[side] for copy in plan.copies} for side in (0, 1))
        if sources & targets or not all(map(self.pool.num_references, sources | targets)):
            raise SharedWrite(f"copies {plan.copies}, of which some are not held, or a target is a source")
        for source, target in plan.copies:
            for offset in range(self.block_size):
                self.slots.pop((target, offset), None)
                if (source, offset) in self.slots:
                    self.slots[target, offset] = self.slots[source, offset]

    def _require_own(self, plan: StepPlan, item: SequenceSlice) -> None:
        for block in item.block_table[item.start // self.block_size :]:
            num_copies = sum(source == block for source, _target in plan.copies)  # made by now, their references stay
            if self.pool.num_references(block) - num_copies != 1:
                raise SharedWrite(f"{item.request_id} writes into block {block}, which it does not have for itself")

    def _write(self, item: SequenceSlice) -> None:
        for position, token in enumerate(item.token_ids, item.start):
            self.slots[self._slot(item, position)] = token

    def context(self, item: SequenceSlice) -> list[int]:
        """The tokens that the slice's KV stands for, read back from the pool."""
        found = []
        for position in range(item.end):
            token = self.slots.get(self._slot(item, position))
            if token is None:
                raise StaleRead(f"{item.request_id}: position {position} was never written")
            found.append(token)
        return found

    def _draw(self, item: SequenceSlice) -> tuple[Drawn, ...]:
        context = self.context(item)
        return tuple(next_token(context, seed_of(spec.sampling)) for spec in item.samples)

    def _slot(self, item: SequenceSlice, position: int) -> tuple[int, int]:
        return item.block_table[position // self.block_size], position % self.block_size


def seed_of(sampling: SamplingParams) -> int:
    """What a draw depends on beside its context: nothing, when it is greedy."""
    return sampling.seed if sampling.temperature else 0


def next_token(context: list[int], seed: int = 0) -> int:
    """What the model without weights draws after `context`."""
    digest = hashlib.sha256(struct.pack(f"<Q{len(context)}I", seed, *context)).digest()
    return int.from_bytes(digest[:4], "little") % VOCAB_SIZE


def undisturbed(prompt: tuple[int, ...], num_tokens: int, eos: tuple[int, ...] = (), seed: int = 0) -> list[int]:
    """The output of a request that runs alone."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < num_tokens:
        tokens.append(next_token(tokens, seed))
        if tokens[-1] in eos:
            break
    return tokens[len(prompt) :]
