"""A token's logits are the same to the bit however its sequence is cut, batched and placed: equality, no tolerance."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from engine.step import SequenceSlice, StepPlan
from engine.torch_runner import TorchModelRunner
from tests.engine.token_stream import PooledSequence, pooled_sequences, prefill

NEW_TOKENS = 4
CHUNKS = (5, 16, 37, 64, 128, 200)


def forced_prompts(vocab_size: int, lengths: tuple[int, ...]) -> list[list[int]]:
    """Random ids: each prompt, followed by the tokens that are forced on it as if they were drawn."""
    order = random.Random(7)
    return [[order.randrange(3, vocab_size) for _ in range(length + NEW_TOKENS)] for length in lengths]


def _alone(runner: TorchModelRunner, prompts: list[list[int]], adapters: Sequence[str]) -> list[list[torch.Tensor]]:
    """Logits after each prompt and each forced token: whole prompt, then decodes, one sequence at a time."""
    logits = []
    sequences = pooled_sequences(runner, prompts, 0, random.Random(1), adapters)
    for sequence, prompt in zip(sequences, prompts, strict=True):
        sequence.token_ids = prompt[:-NEW_TOKENS]
        rows = [prefill(runner, sequence, len(prompt))]
        for token in prompt[-NEW_TOKENS:]:
            sequence.token_ids.append(token)
            rows.append(prefill(runner, sequence, 1))
        logits.append(rows)
    return logits


def assert_chunks_agree(
    runner: TorchModelRunner, lengths: tuple[int, ...], chunks: tuple[int, ...], adapters: Sequence[str] = ("",)
) -> None:
    """The logits after each prompt and its forced tokens do not depend on the chunks they were computed in."""
    prompts = forced_prompts(runner.vocab_size, lengths)
    expected = _alone(runner, prompts, adapters)
    for chunk_tokens in chunks:
        sequences = pooled_sequences(runner, prompts, 0, random.Random(chunk_tokens), adapters)
        for index, sequence in enumerate(sequences):
            got = prefill(runner, sequence, chunk_tokens)  # the forced tokens too: prefilled, not decoded
            assert torch.equal(got, expected[index][-1]), (lengths[index], chunk_tokens)


def assert_batches_agree(runner: TorchModelRunner, lengths: tuple[int, ...], adapters: Sequence[str] = ("",)) -> None:
    """Random subsets of the sequences step together, some in prefill and some in decode."""
    prompts = forced_prompts(runner.vocab_size, lengths)
    expected = _alone(runner, prompts, adapters)
    order = random.Random(3)
    sequences = pooled_sequences(runner, prompts, 0, order, adapters)
    for sequence, prompt in zip(sequences, prompts, strict=True):
        sequence.token_ids = prompt[:-NEW_TOKENS]
    while unfinished := [index for index, item in enumerate(sequences) if _is_unfinished(item, prompts[index])]:
        chosen = order.sample(unfinished, order.randint(1, len(unfinished)))
        slices = tuple(_slice_or_decode(sequences[index], prompts[index], order.choice(CHUNKS)) for index in chosen)
        logits = iter(runner.logits(StepPlan(slices)))
        for index, item in zip(chosen, slices, strict=True):
            if item.samples:
                forced = item.end - len(prompts[index]) + NEW_TOKENS
                assert torch.equal(next(logits), expected[index][forced]), (lengths[index], forced)


def _is_unfinished(sequence: PooledSequence, prompt: list[int]) -> bool:
    return sequence.computed < len(prompt)


def _slice_or_decode(sequence: PooledSequence, prompt: list[int], most_tokens: int) -> SequenceSlice:
    """The next chunk, or, where the known tokens are all computed, the next forced token."""
    if sequence.computed == len(sequence.token_ids):
        sequence.token_ids.append(prompt[sequence.computed])
    return sequence.next_slice(most_tokens)
