"""One output of a request inside the engine: its tokens, its blocks, and when it ends.

A request with several choices is one sequence until its prompt is computed, and then forks: each choice has the
prompt's blocks, of which it holds references, and goes its own way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

from core.blocks import num_blocks_for
from core.errors import BadRequest
from core.identity import BlockHash, extend_hashes
from core.request import FinishReason, GenerateRequest, Grammar, PromptLogprobs, SamplingParams
from engine.step import PROBE, Answer, Drawn, GrammarMatcher, PromptScore, SampleSpec, ScoreSpec, SequenceSlice


class StopWatch(Protocol):
    """Turns one more output token into text and says which stop string it completes, if one."""

    def push(self, token_id: int) -> str | None: ...


StopWatchFactory = Callable[[GenerateRequest], StopWatch]
MatcherFactory = Callable[[Grammar], GrammarMatcher]  # raises BadRequest: on `grammar`


def no_grammars(_grammar: Grammar) -> GrammarMatcher:
    """The MatcherFactory of an engine without a tokenizer."""
    raise BadRequest("grammar", "is not supported by this engine")


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the scheduler must know of the model."""

    block_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]


@dataclass(slots=True, eq=False)
class Sequence:
    """tokens: prompt, then output. KV is in the pool for positions [0, num_computed).

    blocks covers at least num_computed positions while the sequence runs; empty while it waits.
    prefill_only: ends with the first token of each choice, which another worker continues.
    num_choices: how many choices it will fork into, this one first; 1 after that, and where there is one only.
    due_step, number: its place in line (engine/waiting_line.py); num_overtaken: how often it was passed as the head.
    arrived_step: how many steps were planned before it came.
    copies_due_step: step for which it waits, as its blocks take copies (`BlockPool.copy_ahead`); None: for none.
    fetch: number of what it waits for from the disk (`BlockPool.fetch`); None: not looked for since it last waited.
    """

    request: GenerateRequest
    limits: ModelLimits
    namespace: bytes
    prefill_only: bool
    watch: StopWatch | None
    tokens: list[int]
    num_choices: int
    sampling: SamplingParams
    choice: int = 0
    grammar: GrammarMatcher | None = None
    blocks: list[int] = field(default_factory=list)
    hashes: list[BlockHash] = field(default_factory=list)
    num_computed: int = 0
    num_cached_blocks: int = 0  # leading blocks that are findable in the pool
    cancelled: bool = False
    num_cached_prompt: int = 0  # prompt tokens that hits covered
    num_computed_prompt: int = 0
    usage_sent: bool = False
    arrived_step: int = 0
    due_step: int = 0
    number: int = 0
    num_overtaken: int = 0
    copies_due_step: int | None = None
    fetch: int | None = None
    scoring: bool = False  # the prompt's tokens are to be scored here, and are not all told yet
    scores: list[PromptScore] = field(default_factory=list)  # of the prompt's tokens from the second on

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_known(self) -> int:
        return len(self.tokens)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.request.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def most_computed(self) -> int:
        """Tokens whose KV it may come to need: that of the last one is never computed."""
        end = min(self.request.num_prompt_tokens + self.request.stop.max_tokens, self.limits.max_context_tokens)
        return end - 1

    @property
    def decoding(self) -> bool:
        """One token to compute, and it is an output token."""
        return self.num_uncomputed == 1 and self.num_output > 0

    def is_due(self, step: int) -> bool:
        """False: batch work, which gets what the due ones leave."""
        return self.due_step <= step

    def num_blocks_to(self, num_tokens: int) -> int:
        return num_blocks_for(num_tokens, self.limits.block_size)

    def num_growth_blocks(self, most: int, *, must_copy: bool) -> int:
        """Blocks beyond those for the known tokens that its choices may still come to need, `most` at most for each.

        must_copy: its last block is shared with another choice.
        """
        if self.prefill_only:
            return 0
        held = max(len(self.blocks), self.num_blocks_to(self.num_known))
        own = self.num_blocks_to(self.most_computed) - held
        others = (self.num_choices - 1) * max(0, min(most, own + self._forks_in_a_block))
        return max(0, min(most, own + must_copy)) + others

    @property
    def num_fork_blocks(self) -> int:
        """Blocks that its choices need for their first tokens beyond the prompt's: each a next one, or, all but one, a
        copy of the last one."""
        if self.num_choices == 1 or self.prefill_only or self.num_known == self.most_computed:
            return 0
        return self.num_choices - self._forks_in_a_block

    @property
    def _forks_in_a_block(self) -> bool:
        """Its choices will write into the last block of the prompt."""
        return self.num_known % self.limits.block_size > 0 and self.num_known < self.most_computed

    def fork(self, make_watch: StopWatchFactory) -> list[Sequence]:
        """One sequence for each choice, this one first, all with its tokens and block table.

        The caller takes references for the others.
        """
        others = [
            replace(
                self,
                choice=choice,
                num_choices=1,
                sampling=self.request.sampling.for_choice(choice),
                watch=make_watch(self.request) if self.watch else None,
                grammar=self.grammar.fork() if self.grammar else None,
                tokens=list(self.tokens),
                blocks=list(self.blocks),
                hashes=list(self.hashes),
                usage_sent=True,
                scoring=False,
                scores=[],
            )
            for choice in range(1, self.num_choices)
        ]
        self.num_choices = 1
        return [self, *others]

    def reusable_hashes(self) -> list[BlockHash]:
        """Hashes of full blocks that a hit may cover: never all known tokens, so that one is always computed, nor any
        that says what follows it where that is to be scored."""
        most = self.num_known - 1
        if self.num_unscored:
            most = min(most, len(self.scores))
        self.extend_hashes(most)
        return self.hashes[: most // self.limits.block_size]

    @property
    def num_unscored(self) -> int:
        """Prompt tokens that are still to be scored."""
        return self.request.num_prompt_tokens - 1 - len(self.scores) if self.scoring else 0

    def extend_hashes(self, num_tokens: int) -> None:
        """Hash the full blocks among the first `num_tokens` tokens that are not hashed yet."""
        if num_tokens // self.limits.block_size > len(self.hashes):
            self.hashes.extend(
                extend_hashes(self.namespace, self.hashes, self.tokens[:num_tokens], self.limits.block_size)
            )

    def drop_blocks(self) -> list[int]:
        """Forget what is computed; returns the blocks that were held, whose references are now the caller's."""
        blocks, self.blocks = self.blocks, []
        self.num_computed = self.num_cached_blocks = 0
        self.fetch = self.copies_due_step = None
        return blocks

    def slice(self, num_tokens: int) -> SequenceSlice:
        """The next `num_tokens` tokens to compute; draws a token when they reach the end of what is known."""
        end = self.num_computed + num_tokens
        return SequenceSlice(
            request_id=self.request_id,
            token_ids=tuple(self.tokens[self.num_computed : end]),
            start=self.num_computed,
            block_table=tuple(self.blocks[: self.num_blocks_to(end)]),
            samples=(*self._scores_to(end), *(self._samples() if end == self.num_known else (PROBE,))),
            adapter_digest=self.request.adapter.digest if self.request.adapter else "",
        )

    def _scores_to(self, end: int) -> Iterator[ScoreSpec]:
        """What to score of the tokens that follow those up to `end`: none twice, also after a preemption."""
        num_top = self.request.prompt_logprobs or 0
        first = len(self.scores)
        for position in range(first, min(end, first + self.num_unscored)):
            yield ScoreSpec(position - self.num_computed, self.tokens[position + 1], num_top)

    def take_scores(self, answers: Iterable[Answer]) -> list[Drawn]:
        """Keep the scores among a slice's answers. Returns: what was drawn."""
        drawn: list[Drawn] = []
        for answer in answers:
            if isinstance(answer, PromptScore):
                self.scores.append(answer)
            else:
                drawn.append(answer)
        return drawn

    def tell_scores(self) -> PromptLogprobs | None:
        """The prompt's log probabilities, once, where they were asked for."""
        if not self.scoring:
            return None
        self.scoring = False
        scores, self.scores = self.scores, []
        return PromptLogprobs(
            self.request.prompt_logprobs or 0,
            tuple(item.logprob for item in scores),
            tuple(item.rank for item in scores),
            tuple(token_id for item in scores for token_id, _logprob in item.top),
            tuple(logprob for item in scores for _token_id, logprob in item.top),
        )

    def _samples(self) -> tuple[SampleSpec, ...]:
        others = range(1, self.num_choices)
        return tuple(map(self._sample_spec, [self.sampling, *map(self.sampling.for_choice, others)]))

    def _sample_spec(self, sampling: SamplingParams) -> SampleSpec:
        stop = self.request.stop
        banned: tuple[int, ...] = ()
        if self.num_output + 1 <= stop.min_tokens:
            banned = tuple({*self.limits.eos_token_ids, *stop.stop_token_ids})
        prompt = self.request.prompt_token_ids
        if not sampling.has_penalties:
            return SampleSpec(sampling, self.num_output, banned, grammar=self.grammar)
        return SampleSpec(
            sampling,
            self.num_output,
            banned,
            prompt_token_ids=prompt if sampling.repetition_penalty != 1.0 else (),
            output_token_ids=tuple(self.tokens[len(prompt) :]),
            grammar=self.grammar,
        )

    def append(self, token_id: int) -> tuple[FinishReason | None, str | None]:
        """Add a drawn token. Returns why the output ends with it, and the stop string that ends it."""
        self.tokens.append(token_id)
        matched = self.watch.push(token_id) if self.watch else None
        complete = self.grammar is not None and self.grammar.push(token_id)
        stop = self.request.stop
        if token_id in stop.stop_token_ids or (token_id in self.limits.eos_token_ids and not stop.ignore_eos):
            return FinishReason.STOP, None
        if matched is not None:
            return FinishReason.STOP, matched
        if complete:
            return FinishReason.STOP, None
        if self.num_output >= stop.max_tokens or self.num_known >= self.limits.max_context_tokens:
            return FinishReason.LENGTH, None
        return None, None
