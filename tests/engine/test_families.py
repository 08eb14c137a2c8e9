"""Every family, with random weights, says what transformers says, token for token in float32; exact to the bit."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from engine.torch_runner import TorchModelRunner
from tests.engine.invariance import assert_batches_agree, assert_chunks_agree
from tests.engine.random_models import CASES, VOCAB_SIZE, Case, greedy_reference, random_model, save
from tests.engine.token_stream import generate, pooled_sequences, prefill

NUM_BLOCKS = 128
NUM_TOKENS = 24
LENGTHS = (1, 2, 17, 60, 133)
CHUNKS = (1, 16, 37)
SMALLEST_GAP = 1e-3  # between the two best logits of the reference: far above what the order of sums can change


@dataclass(frozen=True)
class Pair:
    """A model in both hands."""

    case: Case
    reference: PreTrainedModel
    folder: Path
    runner: TorchModelRunner


@pytest.fixture(scope="module", params=CASES, ids=[case.name for case in CASES])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    case: Case = request.param
    reference = random_model(case)
    folder = save(reference, tmp_path_factory.mktemp("families") / case.name)
    return Pair(case, reference, folder, TorchModelRunner.load(folder, "float32", NUM_BLOCKS))


def _prompts() -> list[list[int]]:
    order = random.Random(11)
    return [[order.randrange(VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]


def test_greedy_tokens_are_transformers(pair: Pair) -> None:
    prompts = _prompts()
    expected = [greedy_reference(pair.reference, prompt, NUM_TOKENS) for prompt in prompts]
    gaps = [rows.topk(2).values.diff().abs().min() for _, rows in expected]
    assert min(gaps) > SMALLEST_GAP, "the case's seed gives a tie: take another one"
    assert min(len(set(tokens)) for tokens, _ in expected) > NUM_TOKENS // 4  # no token that repeats hides a fault
    for chunk_tokens in (512, 16):
        outputs = generate(pair.runner, prompts, [NUM_TOKENS] * len(prompts), chunk_tokens)
        assert outputs == [tokens for tokens, _ in expected]


def test_logits_are_transformers(pair: Pair) -> None:
    for prompt in _prompts():
        _, rows = greedy_reference(pair.reference, prompt, 1)
        [sequence] = pooled_sequences(pair.runner, [prompt], 0, random.Random(0))
        torch.testing.assert_close(prefill(pair.runner, sequence, len(prompt)), rows[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunks_and_batches_do_not_change_a_bit(pair: Pair, dtype: str) -> None:
    runner = pair.runner if dtype == "float32" else TorchModelRunner.load(pair.folder, dtype, NUM_BLOCKS)
    assert_chunks_agree(runner, LENGTHS[-2:], CHUNKS)
    assert_batches_agree(runner, LENGTHS)


def test_sharded_files_are_the_same_model(pair: Pair, tmp_path: Path) -> None:
    sharded = save(pair.reference, tmp_path / "sharded", shard_size="200KB")
    assert len(list(sharded.glob("model-*.safetensors"))) > 1
    runner = TorchModelRunner.load(sharded, "float32", NUM_BLOCKS)
    prompt = _prompts()[2]
    logits = []
    for either in (pair.runner, runner):
        [sequence] = pooled_sequences(either, [prompt], 0, random.Random(0))
        logits.append(prefill(either, sequence, 16))
    assert torch.equal(*logits)


def test_bfloat16_is_close(pair: Pair) -> None:
    runner = TorchModelRunner.load(pair.folder, "bfloat16", NUM_BLOCKS)
    prompt = _prompts()[3]
    logits = []
    for either in (pair.runner, runner):
        [sequence] = pooled_sequences(either, [prompt], 0, random.Random(0))
        logits.append(prefill(either, sequence, len(prompt)))
    relative = (logits[0] - logits[1]).norm() / logits[0].norm()
    assert 1e-5 < relative < 0.1
