"""One engine step as plain values: what the scheduler plans, what the runner computes.

A prefill chunk and a decode step are the same thing: tokens still to compute, after a context that is already
in the KV pool.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.request import SamplingParams


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """How to draw the token that follows a slice.

    `position` is the index of that token in the output (0 for the first), the only source of randomness
    beside `sampling.seed`. `banned_token_ids` cannot be drawn (EOS and stop ids before min_tokens).
    """

    sampling: SamplingParams
    position: int
    banned_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """The tokens of one sequence to compute in this step.

    token_ids: at least one; the first stands at absolute position `start`, and the KV of positions
        [0, start) is already in the pool.
    block_table: ids of the blocks that cover positions [0, start + len(token_ids)), in token order.
    sample: None when the slice does not reach the end of the known tokens.
    """

    request_id: str
    token_ids: tuple[int, ...]
    start: int
    block_table: tuple[int, ...]
    sample: SampleSpec | None

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """All slices of one step. The runner answers with one token id, or None, for each slice in order."""

    slices: tuple[SequenceSlice, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(item.token_ids) for item in self.slices)
