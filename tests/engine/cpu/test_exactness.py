"""The CPU engine says what transformers says, and a token's bits do not depend on how it was computed.

The golden tokens: test_scheduled_golden.py.
"""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from core.errors import BadRequest, InvariantBroken
from core.request import SamplingParams
from engine.cpu.build import build_library
from engine.cpu.library import KernelLibrary
from engine.cpu.runner import CpuModelRunner
from engine.model_config import ModelConfig
from engine.step import SampleSpec, ScoreSpec, SequenceSlice, StepPlan
from engine.weights import load_weights
from tests.engine.cpu.kernels import LESSER_TARGETS
from tests.engine.golden import golden_cases
from tests.engine.invariance import assert_batches_agree, assert_chunks_agree, forced_prompts
from tests.engine.random_models import CASES, VOCAB_SIZE, Case, greedy_reference, random_model, save
from tests.engine.token_stream import GREEDY, generate, pooled_sequences, prefill

FAMILY_CASES = [case for case in CASES if case.more.get("head_dim", 16) % 16 == 0]
LENGTHS = (1, 2, 3, 15, 16, 17, 31, 47, 48, 49, 64, 95, 96, 97, 129, 140, 257, 300)
CHUNKS = (16, 37, 64)
BFLOAT16_GAP = 0.1  # logits: three times the error (root mean square 0.03) that bfloat16 weights make in each


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def tiny_cpu_runner(request: pytest.FixtureRequest, tiny_folder: Path) -> CpuModelRunner:
    """The tiny model in either dtype."""
    return CpuModelRunner.load(tiny_folder, request.param, num_blocks=512)


def test_bfloat16_differs_only_where_two_tokens_are_close(model_folder: Path) -> None:
    cases = [case for case in golden_cases() if len(case["prompt_ids"]) <= 300]
    runner = CpuModelRunner.load(model_folder, "bfloat16", num_blocks=512)
    outputs = generate(runner, [case["prompt_ids"] for case in cases], [24] * len(cases), chunk_tokens=2048)
    for case, output in zip(cases, outputs, strict=True):
        pairs = zip(output, case["output_ids"], case["gaps"], strict=False)
        first_gap = next((gap for got, expected, gap in pairs if got != expected), 0.0)
        assert first_gap < BFLOAT16_GAP, case["name"]


@pytest.mark.parametrize("case", FAMILY_CASES, ids=[case.name for case in FAMILY_CASES])
def test_every_family_says_what_transformers_says(case: Case, tmp_path: Path) -> None:
    reference = random_model(case)
    runner = CpuModelRunner.load(save(reference, tmp_path / "model"), "float32", num_blocks=128)
    order = random.Random(11)
    for length in (1, 17, 133):
        prompt = [order.randrange(VOCAB_SIZE) for _ in range(length)]
        tokens, rows = greedy_reference(reference, prompt, 12)
        assert generate(runner, [prompt], [len(tokens)], 16) == [tokens]
        [sequence] = pooled_sequences(runner, [prompt], 0, random.Random(0))
        torch.testing.assert_close(prefill(runner, sequence, length), rows[0], rtol=1e-4, atol=1e-4)


def test_chunks_do_not_change_a_bit(tiny_cpu_runner: CpuModelRunner) -> None:
    assert_chunks_agree(tiny_cpu_runner, LENGTHS, (1, *CHUNKS))


def test_batches_do_not_change_a_bit(tiny_cpu_runner: CpuModelRunner) -> None:
    assert_batches_agree(tiny_cpu_runner, LENGTHS)


def test_default_model_does_not_change_a_bit(default_cpu_runner: CpuModelRunner) -> None:
    assert_chunks_agree(default_cpu_runner, (3, 170), CHUNKS)
    assert_batches_agree(default_cpu_runner, (1, 2, 16, 17, 64, 97, 129, 200))


@pytest.mark.parametrize("target", LESSER_TARGETS)
def test_kernels_of_lesser_machines_do_not_change_a_bit(target: str, tiny_folder: Path) -> None:
    library = KernelLibrary(build_library(target_flags=LESSER_TARGETS[target]))
    assert library.instruction_set == {"without-bfloat16": "avx512"}.get(target, target)
    config = ModelConfig.load(tiny_folder)
    for dtype in ("float32", "bfloat16"):
        weights = load_weights(tiny_folder, config, getattr(torch, dtype))
        runner = CpuModelRunner(config, weights, dtype, 512, 16, library)
        assert runner.numeric_class == f"cpu-{library.instruction_set}-{dtype}"
        assert_chunks_agree(runner, (3, 170), CHUNKS)
        assert_batches_agree(runner, LENGTHS)


def test_kv_pages_do_not_change_a_bit(tiny_cpu_runner: CpuModelRunner) -> None:
    """What a hand-off moves is the same whichever way it was computed."""
    prompt = forced_prompts(tiny_cpu_runner.vocab_size, (190,))[0]
    pages = []
    for chunk_tokens in (len(prompt), 37):
        [sequence] = pooled_sequences(tiny_cpu_runner, [prompt], 0, random.Random(chunk_tokens))
        tiny_cpu_runner.kv_pool.zero_()
        prefill(tiny_cpu_runner, sequence, chunk_tokens)
        pages.append(tiny_cpu_runner.kv_pool[list(sequence.block_table)].clone())
    assert torch.equal(*pages)
    assert pages[0].any()


def test_copied_bytes_continue_in_other_blocks(tiny_cpu_runner: CpuModelRunner) -> None:
    """A hand-off: the blocks' bytes, and nothing else, move; a block has exactly geometry.block_bytes of them."""
    runner = tiny_cpu_runner
    prompt = forced_prompts(runner.vocab_size, (77,))[0]
    [sequence] = pooled_sequences(runner, [prompt], 0, random.Random(5))
    sequence.token_ids = prompt[:-1]
    prefill(runner, sequence, len(prompt))
    sequence.token_ids = prompt
    expected = prefill(runner, sequence, 1)
    pool_bytes = runner.kv_pool.view(torch.uint8).view(len(runner.kv_pool), runner.geometry.block_bytes)
    copies = [block for block in range(len(pool_bytes)) if block not in sequence.block_table][
        : len(sequence.block_table)
    ]
    pool_bytes[copies] = pool_bytes[list(sequence.block_table)].clone()
    pool_bytes[list(sequence.block_table)] = 0
    sequence.block_table, sequence.computed = tuple(copies), len(prompt) - 1
    assert torch.equal(prefill(runner, sequence, 1), expected)


def test_rows_without_logits_change_no_other(tiny_cpu_runner: CpuModelRunner) -> None:
    """The last layer is finished for the rows whose logits are wanted: for all of them alone, for a few in a mix."""
    runner = tiny_cpu_runner
    lengths = (100, 50, 130, 1, 97)
    prompts = [prompt[:length] for prompt, length in zip(forced_prompts(100, lengths), lengths, strict=True)]
    sequences = pooled_sequences(runner, prompts, 0, random.Random(6))
    expected, pages = [], []
    for sequence, prompt in zip(sequences, prompts, strict=True):
        scores = tuple(ScoreSpec(row, 0, 0) for row in range(len(prompt)))
        plan = StepPlan((SequenceSlice("all", tuple(prompt), 0, sequence.block_table, scores),))
        expected.append(runner.logits(plan).clone())
        pages.append(runner.kv_pool[list(sequence.block_table)].clone())
    runner.kv_pool.zero_()
    drawn = SampleSpec(GREEDY, 0)
    samples = [(), (drawn,) * 3, (ScoreSpec(0, 0, 0), ScoreSpec(40, 0, 0), drawn), (drawn,) * 2, ()]
    slices = tuple(
        SequenceSlice(str(index), tuple(prompt), 0, sequence.block_table, samples[index])
        for index, (sequence, prompt) in enumerate(zip(sequences, prompts, strict=True))
    )
    rows = [(index, row) for index, item in enumerate(slices) for row in item.logit_rows]
    assert rows == [(1, 49)] * 3 + [(2, 0), (2, 40), (2, 129)] + [(3, 0)] * 2
    found = runner.logits(StepPlan(slices))
    for logits, (index, row) in zip(found, rows, strict=True):
        assert torch.equal(logits, expected[index][row]), (index, row)
    for sequence, page in zip(sequences, pages, strict=True):
        assert torch.equal(runner.kv_pool[list(sequence.block_table)], page)


def test_two_processes_compute_the_same_bits(tiny_folder: Path) -> None:
    command = [sys.executable, "-m", "tests.engine.cpu.print_logits_digest", str(tiny_folder)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    digests = [subprocess.run(command, env=environment, capture_output=True, check=True).stdout for _ in range(2)]
    assert digests[0] == digests[1]
    assert len(digests[0].strip()) == 2 * hashlib.sha256().digest_size


def test_greedy_choice_is_the_sampler_s(tiny_cpu_runner: CpuModelRunner) -> None:
    """The kernels' choice, and the sampler's where a row is random or has banned tokens."""
    tokens = (5, 6, 7)
    plain = _slice("plain", tokens, (0,), SampleSpec(GREEDY, 0))
    [(best,)] = tiny_cpu_runner.run(StepPlan((plain,)))
    assert isinstance(best, int)
    assert best == int(tiny_cpu_runner.logits(StepPlan((plain,)))[0].argmax())
    banned = _slice("banned", tokens, (1,), SampleSpec(GREEDY, 0, (best,)))
    drawn = _slice("drawn", tokens, (2,), SampleSpec(SamplingParams(temperature=1.0, seed=3), 0))
    silent = _slice("silent", tokens, (3,))
    answer = tiny_cpu_runner.run(StepPlan((silent, plain, banned, drawn)))
    assert answer[:2] == [(), (best,)]
    assert answer[2] != (best,)
    assert len(answer[3]) == 1


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (SequenceSlice("r", (1,) * 17, 0, (0,)), "request r: 1 blocks do not cover 17 tokens"),
        (SequenceSlice("r", (1,), 0, (512,)), "request r: a block id lies outside the pool of 512"),
        (SequenceSlice("r", (1,), 0, (-1,)), "request r: a block id lies outside the pool of 512"),
        (SequenceSlice("r", (100000,), 0, (0,)), "request r: a token id lies outside the vocabulary"),
        (
            SequenceSlice("r", (1, 2), 0, (0,), (SampleSpec(GREEDY, 0), ScoreSpec(0, 1, 0))),
            "request r: samples are not in the order of their rows",
        ),
        (SequenceSlice("r", (), 0, (0,)), "request r: empty slice"),
        (SequenceSlice("r", (1,), 1024, tuple(range(65))), "request r: 1025 tokens exceed the model's context"),
    ],
)
def test_a_slice_out_of_bounds_is_named(tiny_cpu_runner: CpuModelRunner, item: SequenceSlice, message: str) -> None:
    fine = _slice("fine", (1, 2), (3,))
    with pytest.raises(InvariantBroken, match=message):
        tiny_cpu_runner.run(StepPlan((fine, item)))


def test_other_block_sizes_and_dtypes_are_refused(tiny_folder: Path) -> None:
    with pytest.raises(BadRequest, match="block_size: the CPU kernels need 16, got 32"):
        CpuModelRunner.load(tiny_folder, "float32", num_blocks=4, block_size=32)
    with pytest.raises(BadRequest, match="dtype"):
        CpuModelRunner.load(tiny_folder, "float16", num_blocks=4)


def _slice(name: str, tokens: tuple[int, ...], blocks: tuple[int, ...], *samples: SampleSpec) -> SequenceSlice:
    return SequenceSlice(name, tokens, 0, blocks, samples)
