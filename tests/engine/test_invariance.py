"""A token's logits are the same to the bit however its sequence is cut, batched and placed: equality, no tolerance."""

from __future__ import annotations

import random

import pytest
import torch

from engine.step import SequenceSlice, StepPlan
from engine.torch_runner import TorchModelRunner
from tests.engine.token_stream import PooledSequence, pooled_sequences, prefill

LENGTHS = (1, 2, 3, 15, 16, 17, 31, 64, 100, 127, 128, 129, 140, 255, 257, 300)
NEW_TOKENS = 4
CHUNKS = (5, 16, 37, 64, 128, 200)


def _prompts(vocab_size: int, lengths: tuple[int, ...]) -> list[list[int]]:
    """Random ids: each prompt, followed by the tokens that are forced on it as if they were drawn."""
    order = random.Random(7)
    return [[order.randrange(3, vocab_size) for _ in range(length + NEW_TOKENS)] for length in lengths]


def _alone(runner: TorchModelRunner, prompts: list[list[int]]) -> list[list[torch.Tensor]]:
    """Logits after each prompt and each forced token: whole prompt, then decodes, one sequence at a time."""
    logits = []
    for sequence, prompt in zip(pooled_sequences(runner, prompts, 0, random.Random(1)), prompts, strict=True):
        sequence.token_ids = prompt[:-NEW_TOKENS]
        rows = [prefill(runner, sequence, len(prompt))]
        for token in prompt[-NEW_TOKENS:]:
            sequence.token_ids.append(token)
            rows.append(prefill(runner, sequence, 1))
        logits.append(rows)
    return logits


def _assert_chunks_agree(runner: TorchModelRunner, lengths: tuple[int, ...], chunks: tuple[int, ...]) -> None:
    prompts = _prompts(runner.vocab_size, lengths)
    expected = _alone(runner, prompts)
    for chunk_tokens in chunks:
        for index, sequence in enumerate(pooled_sequences(runner, prompts, 0, random.Random(chunk_tokens))):
            got = prefill(runner, sequence, chunk_tokens)  # the forced tokens too: prefilled, not decoded
            assert torch.equal(got, expected[index][-1]), (lengths[index], chunk_tokens)


def _assert_batches_agree(runner: TorchModelRunner, lengths: tuple[int, ...]) -> None:
    """Random subsets of the sequences step together, some in prefill and some in decode."""
    prompts = _prompts(runner.vocab_size, lengths)
    expected = _alone(runner, prompts)
    order = random.Random(3)
    sequences = pooled_sequences(runner, prompts, 0, order)
    for sequence, prompt in zip(sequences, prompts, strict=True):
        sequence.token_ids = prompt[:-NEW_TOKENS]
    while unfinished := [index for index, item in enumerate(sequences) if _is_unfinished(item, prompts[index])]:
        chosen = order.sample(unfinished, order.randint(1, len(unfinished)))
        slices = tuple(_slice_or_decode(sequences[index], prompts[index], order.choice(CHUNKS)) for index in chosen)
        logits = iter(runner.logits(StepPlan(slices)))
        for index, item in zip(chosen, slices, strict=True):
            if item.sample is not None:
                forced = item.end - len(prompts[index]) + NEW_TOKENS
                assert torch.equal(next(logits), expected[index][forced]), (lengths[index], forced)


def _is_unfinished(sequence: PooledSequence, prompt: list[int]) -> bool:
    return sequence.computed < len(prompt)


def _slice_or_decode(sequence: PooledSequence, prompt: list[int], most_tokens: int) -> SequenceSlice:
    """The next chunk, or, where the known tokens are all computed, the next forced token."""
    if sequence.computed == len(sequence.token_ids):
        sequence.token_ids.append(prompt[sequence.computed])
    return sequence.next_slice(most_tokens)


def test_chunks_do_not_change_a_bit(tiny_runner: TorchModelRunner) -> None:
    _assert_chunks_agree(tiny_runner, LENGTHS, CHUNKS)


def test_batches_do_not_change_a_bit(tiny_runner: TorchModelRunner) -> None:
    _assert_batches_agree(tiny_runner, LENGTHS)


def test_default_model_chunks_do_not_change_a_bit(default_runner: TorchModelRunner) -> None:
    _assert_chunks_agree(default_runner, (3, 170), (16, 37, 64))


def test_default_model_batches_do_not_change_a_bit(default_runner: TorchModelRunner) -> None:
    _assert_batches_agree(default_runner, (1, 2, 16, 17, 64, 127, 129, 200))


def test_kv_pages_do_not_change_a_bit(tiny_runner: TorchModelRunner) -> None:
    """What a hand-off moves is the same whichever way it was computed."""
    prompt = _prompts(tiny_runner.vocab_size, (190,))[0]
    pages = []
    for chunk_tokens in (len(prompt), 37):
        [sequence] = pooled_sequences(tiny_runner, [prompt], 0, random.Random(chunk_tokens))
        tiny_runner.kv_pool.zero_()
        prefill(tiny_runner, sequence, chunk_tokens)
        pages.append(tiny_runner.kv_pool[list(sequence.block_table)].clone())
    assert torch.equal(*pages)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_thread_count_does_not_change_a_bit(tiny_runner: TorchModelRunner, num_threads: int) -> None:
    prompt = _prompts(tiny_runner.vocab_size, (150,))[0]
    [sequence] = pooled_sequences(tiny_runner, [prompt], 0, random.Random(0))
    expected = prefill(tiny_runner, sequence, len(prompt))
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        sequence.computed = 0
        assert torch.equal(prefill(tiny_runner, sequence, 64), expected)
    finally:
        torch.set_num_threads(before)
