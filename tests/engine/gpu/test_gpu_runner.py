"""The GPU runner on a CPU: its layouts, buckets, padding and drawing, with "graphs" that are called again.

With the Triton kernels it runs in tests/bench/test_gpu_run.py, its exact mode included.
"""

from __future__ import annotations

import random
from array import array
from pathlib import Path

import pytest
import torch

from core.errors import InvariantBroken
from core.request import SamplingParams
from engine.gpu.device import HostDevice
from engine.gpu.runner import GpuModelRunner
from engine.step import NOT_FINITE, SampleSpec, SequenceSlice, StepPlan
from engine.torch_runner import TorchModelRunner
from tests.engine.gpu.host_runner import NUM_BLOCKS, load_host_gpu
from tests.engine.random_adapters import write_adapter
from tests.engine.token_stream import generate, pooled_sequences, prefill

PROMPT_LENGTHS = (1, 15, 16, 17, 70)


class RecordingDevice(HostDevice):
    """Remembers what was queued and awaited."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def stage(self, values: array[int]) -> torch.Tensor:
        self.calls.append("stage")
        return super().stage(values)

    def finish(self) -> None:
        self.calls.append("finish")


@pytest.fixture(scope="module")
def runner(tiny_folder: Path) -> GpuModelRunner:
    """float32; decode steps of up to 4 sequences go by graph, larger ones do not."""
    return load_host_gpu(tiny_folder)


def prompts(vocab_size: int) -> list[list[int]]:
    order = random.Random(5)
    return [[order.randrange(3, vocab_size) for _ in range(length)] for length in PROMPT_LENGTHS]


@pytest.mark.parametrize("chunk_tokens", [2048, 16, 5])
def test_tokens_are_those_of_the_torch_runner(runner: GpuModelRunner, tiny_folder: Path, chunk_tokens: int) -> None:
    """Five decodes at first, which no bucket holds; then fewer, as the shorter ones end."""
    expected = generate(
        TorchModelRunner.load(tiny_folder, "float32", NUM_BLOCKS), prompts(runner.vocab_size), (3, 8, 12, 12, 12), 2048
    )
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    assert generate(runner, prompts(runner.vocab_size), (3, 8, 12, 12, 12), chunk_tokens) == expected


def test_adapters_say_what_they_say_in_the_torch_runner(tiny_folder: Path, tmp_path: Path) -> None:
    """Steps with an adapter are eager; those without go on by graph."""
    adapters = {"a": write_adapter(tmp_path, tiny_folder)}
    runner = load_host_gpu(tiny_folder, adapters=adapters)
    torch_runner = TorchModelRunner.load(tiny_folder, "float32", NUM_BLOCKS, adapters=adapters)
    some, lengths = prompts(runner.vocab_size)[:4], (3, 8, 12, 12)
    plain = generate(torch_runner, some, lengths, 16)
    for mix in (("", "a"), ("a", "")):
        expected = generate(torch_runner, some, lengths, 16, mix)
        assert generate(runner, some, lengths, 16, mix) == expected
        for index, (adapted, base) in enumerate(zip(expected, plain, strict=True)):
            assert (adapted == base) is (mix[index % 2] == "")
    assert generate(runner, some, lengths, 16) == plain


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_graph_computes_what_an_eager_step_computes(tiny_folder: Path, dtype: str) -> None:
    """Padded rows beside the real ones, stale inputs of a larger step before: neither may be seen."""
    by_graph = load_host_gpu(tiny_folder, dtype)
    eager = load_host_gpu(tiny_folder, dtype, max_graph_sequences=0)
    for count in (4, 3, 2, 1, 3):
        logits = []
        for item in (by_graph, eager):
            sequences = pooled_sequences(item, prompts(item.vocab_size)[:count], 8, random.Random(count))
            for sequence in sequences:
                prefill(item, sequence, 2048)
                sequence.token_ids.append(7)
            logits.append(item.logits(StepPlan(tuple(sequence.next_slice(1) for sequence in sequences))))
        assert torch.equal(*logits)
        assert torch.equal(by_graph.kv_pool, eager.kv_pool)


def test_padding_rows_write_to_nobodys_block(runner: GpuModelRunner) -> None:
    runner.kv_pool.fill_(1.0)
    plan = StepPlan(tuple(SequenceSlice(str(row), (9,), 0, (row,)) for row in range(3)))  # bucket 4
    assert runner.run(plan) == [()] * 3
    changed = (runner.kv_pool != 1.0).flatten(1).any(dim=-1)
    assert changed.nonzero().flatten().tolist() == [0, 1, 2]


def test_blocks_are_copied_before_the_step_writes(runner: GpuModelRunner) -> None:
    """Two branches go on from one prompt; the first has a copy of its last block, the second writes in place."""
    spec = SampleSpec(SamplingParams(temperature=0.0), 0)
    [[token, again]] = runner.run(StepPlan((SequenceSlice("prompt", (5, 6, 7), 0, (3,), (spec, spec)),)))
    assert token == again
    branches = tuple(SequenceSlice(str(block), (token,), 3, (block,), (spec,)) for block in (9, 3))
    copied, in_place = runner.run(StepPlan(branches, copies=((3, 9),)))
    assert copied == in_place
    assert torch.equal(runner.kv_pool[9], runner.kv_pool[3])
    assert not torch.equal(runner.kv_pool[9], runner.kv_pool[2])


def test_a_step_is_over_only_when_the_device_has_finished(tiny_folder: Path) -> None:
    """What it wrote is pushed to other workers next: also when nothing is drawn, by graph and eager."""
    device = RecordingDevice()
    runner = load_host_gpu(tiny_folder, device=device)
    spec = SampleSpec(SamplingParams(temperature=0.0), 0)
    for token_ids in ((5,), (5, 6)):
        for samples in ((), (spec,)):
            device.calls.clear()
            runner.run(StepPlan((SequenceSlice("r", token_ids, 0, (3,), samples),)))
            assert (device.calls[0], device.calls[-1]) == ("stage", "finish")


def test_what_is_more_than_greedy_is_drawn_from_the_same_logits(runner: GpuModelRunner, tiny_folder: Path) -> None:
    """Beside a greedy one, and with a row that samples nothing between them."""
    samples = (
        (SampleSpec(SamplingParams(temperature=0.0), 0),),
        (),
        (
            SampleSpec(SamplingParams(temperature=1.0, seed=11), 3),
            SampleSpec(SamplingParams(temperature=1.0, seed=12), 3),
        ),
        (SampleSpec(SamplingParams(temperature=0.0, top_logprobs=2), 1),),
    )
    plan = StepPlan(
        tuple(SequenceSlice(str(row), (20, 30 + row), 0, (row,), specs) for row, specs in enumerate(samples))
    )
    expected = TorchModelRunner.load(tiny_folder, "float32", NUM_BLOCKS).run(plan)
    got = runner.run(plan)
    assert got[:3] == expected[:3]
    [[scored]], [[expected_scored]] = got[3:], expected[3:]
    assert scored.token_id == expected_scored.token_id
    assert scored.logprobs.drawn == pytest.approx(expected_scored.logprobs.drawn, abs=1e-5)


@pytest.mark.parametrize(
    ("item", "problem"),
    [
        (SequenceSlice("r", (5,), 16, (0,)), "1 blocks do not cover 17 tokens"),
        (SequenceSlice("r", (5,), 0, (NUM_BLOCKS,)), f"outside the pool of {NUM_BLOCKS}"),  # the scratch block
        (SequenceSlice("r", (100_000,), 0, (0,)), "outside the vocabulary"),
        (SequenceSlice("r", (), 0, (0,)), "empty slice"),
    ],
)
def test_a_slice_that_reaches_outside_is_refused(runner: GpuModelRunner, item: SequenceSlice, problem: str) -> None:
    good = SequenceSlice("good", (5,), 0, (1,))
    assert runner.run(StepPlan((good,))) == [()]
    with pytest.raises(InvariantBroken, match=problem):
        runner.run(StepPlan((good, item)))


def test_logits_that_are_not_finite_are_seen_in_a_graph(tiny_folder: Path) -> None:
    runner = load_host_gpu(tiny_folder)
    assert not runner.kv_pool.any()  # captures and warm-up wrote elsewhere
    plan = StepPlan((SequenceSlice("r", (5,), 17, (3, 4), (SampleSpec(SamplingParams(temperature=0.0), 0),)),))
    assert isinstance(runner.run(plan)[0][0], int)
    runner.kv_pool[3] = float("nan")
    assert runner.run(plan) == [(NOT_FINITE,)]
    assert not runner.kv_pool[4].any()


def test_the_identity_names_kernel_device_and_mode(runner: GpuModelRunner) -> None:
    assert runner.numeric_class == "reference-host-float32-tiled"
    assert runner.kv_layout == "block,layer,key-value,token,head,dim"
    assert runner.kv_pool.is_contiguous()
    assert runner.kv_pool[0].nbytes == runner.geometry.block_bytes
