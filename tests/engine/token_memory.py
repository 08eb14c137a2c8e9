"""A runner without a model: its KV pool remembers which token stands in each slot, and checks it at every read.

The next token is a hash of all tokens before it, so a sequence that ever read another one's block, a stale block or a
hole draws differently from its undisturbed run, or raises at once.
"""

from __future__ import annotations

import hashlib
import struct

from engine.step import Drawn, SequenceSlice, StepPlan

VOCAB_SIZE = 1000


class StaleRead(Exception):
    """A slot did not hold the token that the sequence put there."""


class TokenMemory:
    """`run` as ModelRunner's. `expected` maps a request to its known tokens, to check reads against."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots: dict[tuple[int, int], int] = {}
        self.computed_tokens = 0

    def run(self, plan: StepPlan) -> list[tuple[Drawn, ...]]:
        for item in plan.slices:  # all writes come before all reads, as in one fused step
            for position, token in enumerate(item.token_ids, item.start):
                self.slots[self._slot(item, position)] = token
            self.computed_tokens += len(item.token_ids)
        return [self._draw(item) for item in plan.slices]

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
        return tuple(next_token(context) for _spec in item.samples)

    def _slot(self, item: SequenceSlice, position: int) -> tuple[int, int]:
        return item.block_table[position // self.block_size], position % self.block_size


def next_token(context: list[int]) -> int:
    """What the model without weights draws after `context`."""
    digest = hashlib.sha256(struct.pack(f"<{len(context)}I", *context)).digest()
    return int.from_bytes(digest[:4], "little") % VOCAB_SIZE


def undisturbed(prompt: tuple[int, ...], num_tokens: int, eos: tuple[int, ...] = ()) -> list[int]:
    """The output of a request that runs alone."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < num_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] in eos:
            break
    return tokens[len(prompt) :]
