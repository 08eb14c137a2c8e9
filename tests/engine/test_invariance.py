"""The bitwise properties of tests/engine/invariance.py, on a tiny model and the default one."""

from __future__ import annotations

import random

import pytest
import torch

from engine.torch_runner import TorchModelRunner
from tests.engine.invariance import CHUNKS, assert_batches_agree, assert_chunks_agree, forced_prompts
from tests.engine.token_stream import pooled_sequences, prefill

LENGTHS = (1, 2, 3, 15, 16, 17, 31, 64, 100, 127, 128, 129, 140, 255, 257, 300)


def test_chunks_do_not_change_a_bit(tiny_runner: TorchModelRunner) -> None:
    assert_chunks_agree(tiny_runner, LENGTHS, CHUNKS)


def test_batches_do_not_change_a_bit(tiny_runner: TorchModelRunner) -> None:
    assert_batches_agree(tiny_runner, LENGTHS)


def test_default_model_chunks_do_not_change_a_bit(default_runner: TorchModelRunner) -> None:
    assert_chunks_agree(default_runner, (3, 170), (16, 37, 64))


def test_default_model_batches_do_not_change_a_bit(default_runner: TorchModelRunner) -> None:
    assert_batches_agree(default_runner, (1, 16, 17, 64, 129))


def test_kv_pages_do_not_change_a_bit(tiny_runner: TorchModelRunner) -> None:
    """What a hand-off moves is the same whichever way it was computed."""
    prompt = forced_prompts(tiny_runner.vocab_size, (190,))[0]
    pages = []
    for chunk_tokens in (len(prompt), 37):
        [sequence] = pooled_sequences(tiny_runner, [prompt], 0, random.Random(chunk_tokens))
        tiny_runner.kv_pool.zero_()
        prefill(tiny_runner, sequence, chunk_tokens)
        pages.append(tiny_runner.kv_pool[list(sequence.block_table)].clone())
    assert torch.equal(*pages)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_thread_count_does_not_change_a_bit(tiny_runner: TorchModelRunner, num_threads: int) -> None:
    prompt = forced_prompts(tiny_runner.vocab_size, (150,))[0]
    [sequence] = pooled_sequences(tiny_runner, [prompt], 0, random.Random(0))
    expected = prefill(tiny_runner, sequence, len(prompt))
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        sequence.computed = 0
        assert torch.equal(prefill(tiny_runner, sequence, 64), expected)
    finally:
        torch.set_num_threads(before)
