"""Drives a runner without the scheduler, for tests of the arithmetic alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from core.blocks import num_blocks_for
from core.request import SamplingParams
from engine.step import Drawn, SampleSpec, SequenceSlice, StepPlan
from engine.torch_runner import TorchModelRunner

GREEDY = SamplingParams(temperature=0.0)


class PooledSequence:
    """Known tokens of one sequence, and blocks of the pool for all that it may become."""

    def __init__(
        self, name: str, token_ids: Sequence[int], block_table: Sequence[int], adapter_digest: str = ""
    ) -> None:
        self.name = name
        self.token_ids = list(token_ids)
        self.block_table = tuple(block_table)
        self.adapter_digest = adapter_digest
        self.computed = 0

    def next_slice(self, most_tokens: int, position: int = 0) -> SequenceSlice:
        """The next tokens to compute, counted as computed; samples where it reaches the end of the known tokens."""
        start, end = self.computed, min(self.computed + most_tokens, len(self.token_ids))
        self.computed = end
        return SequenceSlice(
            request_id=self.name,
            token_ids=tuple(self.token_ids[start:end]),
            start=start,
            block_table=self.block_table[: num_blocks_for(end, 16)],
            samples=(SampleSpec(GREEDY, position),) if end == len(self.token_ids) else (),
            adapter_digest=self.adapter_digest,
        )


def pooled_sequences(
    runner: TorchModelRunner,
    prompts: Sequence[Sequence[int]],
    most_new_tokens: int,
    order: random.Random,
    adapters: Sequence[str] = ("",),
) -> list[PooledSequence]:
    """Sequences with shuffled, disjoint blocks; `adapters` are theirs in turn."""
    free = list(range(len(runner.kv_pools[0])))
    order.shuffle(free)
    sequences = []
    for index, prompt in enumerate(prompts):
        count = num_blocks_for(len(prompt) + most_new_tokens, runner.geometry.block_size)
        adapter = adapters[index % len(adapters)]
        sequences.append(PooledSequence(str(index), prompt, free[:count], adapter))
        del free[:count]
    return sequences


def prefill(runner: TorchModelRunner, sequence: PooledSequence, chunk_tokens: int) -> torch.Tensor:
    """Compute all known tokens alone, in chunks; logits of the next one, [vocab_size]."""
    while True:
        logits = runner.logits(StepPlan((sequence.next_slice(chunk_tokens),)))
        if len(logits):
            return logits[0].clone()


def generate(
    runner: TorchModelRunner,
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int],
    chunk_tokens: int,
    adapters: Sequence[str] = ("",),
) -> list[list[int]]:
    """Greedy outputs of the given lengths: prompts in chunks one by one, then all decodes in one batch."""
    sequences = pooled_sequences(runner, prompts, max(lengths), random.Random(0), adapters)
    for sequence in sequences:
        drawn: tuple[Drawn, ...] = ()
        while not drawn:
            [drawn] = runner.run(StepPlan((sequence.next_slice(chunk_tokens),)))
        sequence.token_ids += drawn
    wanted = [len(prompt) + length for prompt, length in zip(prompts, lengths, strict=True)]
    while True:
        running = [item for item, end in zip(sequences, wanted, strict=True) if len(item.token_ids) < end]
        if not running:
            break
        step = runner.run(StepPlan(tuple(item.next_slice(1) for item in running)))
        for item, tokens in zip(running, step, strict=True):
            item.token_ids += tokens
    return [item.token_ids[len(prompt) :] for item, prompt in zip(sequences, prompts, strict=True)]
