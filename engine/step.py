"""One engine step as plain values: what the scheduler plans, what the runner computes, what came of it.

A prefill chunk and a decode step are the same thing: tokens still to compute, after a context that is already
in the KV pool.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar, Final, Protocol

from core.request import FinishReason, SamplingParams, TokenDelta, TokenLogprobs


@dataclass(frozen=True, slots=True)
class DeadEnd:
    """No token may be drawn: a grammar leaves none, or went beyond its bounds. It ends that output alone."""

    message: str
    reason: FinishReason = FinishReason.DEAD_END


# Of a row of logits that is no row of numbers. The same tokens would give it again, whoever computes them.
NOT_FINITE: Final = DeadEnd("the model's logits hold a NaN or an infinity", FinishReason.ERROR)


class GrammarMatcher(Protocol):
    """Which tokens a grammar allows next: a function of the grammar and the tokens pushed so far."""

    def mask(self) -> bytes | DeadEnd:
        """A bit for each token of the vocabulary, the lowest id in the lowest bit of the first byte."""
        ...

    def push(self, token_id: int) -> bool:
        """Take a drawn token. True: the output is complete, nothing can follow."""
        ...

    def fork(self) -> GrammarMatcher:
        """Another one at the same place, for another choice."""
        ...


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """How to draw the token that follows a slice.

    `position` is the index of that token in the output (0 for the first), the only source of randomness
    beside `sampling.seed`. `banned_token_ids` cannot be drawn (EOS and stop ids before min_tokens).
    `prompt_token_ids` and `output_token_ids` are what penalties look at: empty where none needs them.
    `grammar` is read while the step computes, and moves on only when the step commits.
    """

    sampling: SamplingParams
    position: int
    banned_token_ids: tuple[int, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    output_token_ids: tuple[int, ...] = ()
    grammar: GrammarMatcher | None = None

    @property
    def changes_logits(self) -> bool:
        """The draw is not from the model's own logits."""
        sampling = self.sampling
        return bool(self.banned_token_ids or sampling.logit_bias or sampling.has_penalties or self.grammar)

    @property
    def is_plain_greedy(self) -> bool:
        """The answer is the id of the highest logit, and nothing else."""
        return self.sampling.temperature == 0.0 and self.sampling.top_logprobs is None and not self.changes_logits


@dataclass(frozen=True, slots=True)
class ScoreSpec:
    """What the model says of a token that is known already: the one that follows token `row` of the slice."""

    row: int
    token_id: int
    num_top: int

    is_plain_greedy: ClassVar[bool] = False


RowSpec = SampleSpec | ScoreSpec  # each is about one row of logits

# Asked of a slice that ends before the known tokens do: a KV block is cached and sent away only where the logits that
# follow it are numbers. What it draws is of no use.
PROBE: Final = SampleSpec(SamplingParams(temperature=0.0), 0)


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """The tokens of one sequence to compute in this step.

    token_ids: at least one; the first stands at absolute position `start`, and the KV of positions
        [0, start) is already in the pool.
    block_table: ids of the blocks that cover positions [0, start + len(token_ids)), in token order.
    adapter_digest: of the adapter that computes it, empty for the model alone.
    samples: what to draw from the logits of the last token; several where a prompt is continued more than once, PROBE
        where the slice does not reach the end of the known tokens. Before them, what to score of a prompt.
    """

    request_id: str
    token_ids: tuple[int, ...]
    start: int
    block_table: tuple[int, ...]
    samples: tuple[RowSpec, ...] = ()
    adapter_digest: str = ""

    @property
    def logit_rows(self) -> list[int]:
        """The token, counted in the slice, whose logits each of `samples` is about."""
        last = len(self.token_ids) - 1
        return [spec.row if isinstance(spec, ScoreSpec) else last for spec in self.samples]

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def is_decode(self) -> bool:
        """One token, which is output."""
        last = self.samples[-1] if len(self.token_ids) == 1 and self.samples else None
        return isinstance(last, SampleSpec) and last.position > 0


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token drawn for a spec with `top_logprobs`."""

    token_id: int
    logprobs: TokenLogprobs


@dataclass(frozen=True, slots=True)
class PromptScore:
    """The answer to a ScoreSpec, where it is not NOT_FINITE. rank: how many tokens are at least as probable; top: as in
    TokenLogprobs."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


Drawn = int | ScoredToken | DeadEnd  # a bare id for all specs without `top_logprobs`
Answer = Drawn | PromptScore


@dataclass(frozen=True, slots=True)
class StepPlan:
    """All slices of one step. The runner answers with what it drew for each slice, in order.

    copies: (source, target) blocks to copy, whole, before anything of the step is written. No target is a source.
    """

    slices: tuple[SequenceSlice, ...]
    copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(item.token_ids) for item in self.slices)

    @property
    def num_decodes(self) -> int:
        """Slices that are one output token, whose next one is drawn."""
        return sum(item.is_decode for item in self.slices)

    @property
    def prompts(self) -> frozenset[str]:
        """Requests of which it computes more than the next token."""
        return frozenset(item.request_id for item in self.slices if not item.is_decode)

    @property
    def samples(self) -> list[RowSpec]:
        """Every draw and score of the step, in order: a row of logits each."""
        return [spec for item in self.slices for spec in item.samples]

    def by_slice(self, answers: Iterable[Answer]) -> list[tuple[Answer, ...]]:
        """The answers to `samples`, slice by slice."""
        rest = iter(answers)
        return [tuple(islice(rest, len(item.samples))) for item in self.slices]


@dataclass(frozen=True, slots=True)
class Progress:
    """What one step did for one sequence.

    num_computed: tokens whose KV is now in `block_table`. deltas: the tokens drawn, one for each choice that begins.
    ended: no choice of the request is left here. handed_over: that is because it was only prefilled; its references
    on `block_table` are now the receiver's to release.
    """

    request_id: str
    num_computed: int
    block_table: tuple[int, ...]
    deltas: tuple[TokenDelta, ...]
    ended: bool = False
    handed_over: bool = False
