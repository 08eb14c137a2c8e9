"""One request inside the engine: its tokens, its blocks, and when it ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from core.blocks import num_blocks_for
from core.identity import BlockHash, extend_hashes
from core.request import FinishReason, GenerateRequest
from engine.step import SampleSpec, SequenceSlice


class StopWatch(Protocol):
    """Turns one more output token into text and says which stop string it completes, if one."""

    def push(self, token_id: int) -> str | None: ...


StopWatchFactory = Callable[[GenerateRequest], StopWatch]


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
    prefill_only: ends with the first token, which another worker continues.
    due_step, number: its place in line (engine/waiting_line.py); num_overtaken: how often it was passed as the head.
    """

    request: GenerateRequest
    limits: ModelLimits
    namespace: bytes
    prefill_only: bool
    watch: StopWatch | None
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    hashes: list[BlockHash] = field(default_factory=list)
    num_computed: int = 0
    num_cached_blocks: int = 0  # leading blocks that are findable in the pool
    cancelled: bool = False
    num_cached_prompt: int = 0  # prompt tokens that hits covered
    num_computed_prompt: int = 0
    usage_sent: bool = False
    due_step: int = 0
    number: int = 0
    num_overtaken: int = 0

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
    def decoding(self) -> bool:
        """One token to compute, and it is an output token."""
        return self.num_uncomputed == 1 and self.num_output > 0

    def is_due(self, step: int) -> bool:
        """False: batch work, which gets what the due ones leave."""
        return self.due_step <= step

    def num_blocks_to(self, num_tokens: int) -> int:
        return num_blocks_for(num_tokens, self.limits.block_size)

    def num_growth_blocks(self, most: int) -> int:
        """Blocks beyond those for the known tokens that it may still come to need, `most` at most."""
        if self.prefill_only:
            return 0
        end = min(self.request.num_prompt_tokens + self.request.stop.max_tokens, self.limits.max_context_tokens)
        held = max(len(self.blocks), self.num_blocks_to(self.num_known))
        return max(0, min(most, self.num_blocks_to(end - 1) - held))  # the last token's KV is never computed

    def reusable_hashes(self) -> list[BlockHash]:
        """Hashes of full blocks that a hit may cover: never all known tokens, so that one is always computed."""
        self.extend_hashes(self.num_known - 1)
        return self.hashes[: (self.num_known - 1) // self.limits.block_size]

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
        return blocks

    def slice(self, num_tokens: int) -> SequenceSlice:
        """The next `num_tokens` tokens to compute; draws a token when they reach the end of what is known."""
        end = self.num_computed + num_tokens
        return SequenceSlice(
            request_id=self.request_id,
            token_ids=tuple(self.tokens[self.num_computed : end]),
            start=self.num_computed,
            block_table=tuple(self.blocks[: self.num_blocks_to(end)]),
            samples=(self._sample_spec(),) if end == self.num_known else (),
        )

    def _sample_spec(self) -> SampleSpec:
        stop = self.request.stop
        banned: tuple[int, ...] = ()
        if self.num_output + 1 <= stop.min_tokens:
            banned = tuple({*self.limits.eos_token_ids, *stop.stop_token_ids})
        sampling, prompt = self.request.sampling, self.request.prompt_token_ids
        if not sampling.has_penalties:
            return SampleSpec(sampling, self.num_output, banned)
        return SampleSpec(
            sampling,
            self.num_output,
            banned,
            prompt_token_ids=prompt if sampling.repetition_penalty != 1.0 else (),
            output_token_ids=tuple(self.tokens[len(prompt) :]),
        )

    def append(self, token_id: int) -> tuple[FinishReason | None, str | None]:
        """Add a drawn token. Returns why the request ends with it, and the stop string that ends it."""
        self.tokens.append(token_id)
        matched = self.watch.push(token_id) if self.watch else None
        stop = self.request.stop
        if token_id in stop.stop_token_ids or (token_id in self.limits.eos_token_ids and not stop.ignore_eos):
            return FinishReason.STOP, None
        if matched is not None:
            return FinishReason.STOP, matched
        if self.num_output >= stop.max_tokens or self.num_known >= self.limits.max_context_tokens:
            return FinishReason.LENGTH, None
        return None, None
