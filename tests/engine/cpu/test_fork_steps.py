"""Steps that continue one prompt more than once, on both runners: several draws from one slice, and block copies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from core.errors import InvariantBroken
from core.request import SamplingParams
from engine.cpu.runner import CpuModelRunner
from engine.step import SampleSpec, SequenceSlice, StepPlan
from engine.torch_runner import TorchModelRunner

PROMPT = tuple(range(5, 25))  # a block of 16 and 4 tokens of the next
GREEDY = (SampleSpec(SamplingParams(0.0), 1),)

Runner = CpuModelRunner | TorchModelRunner


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=[CpuModelRunner, TorchModelRunner])
def runner(request: pytest.FixtureRequest, dtype: str, tiny_folder: Path) -> Runner:
    runner: Runner = request.param.load(tiny_folder, dtype, num_blocks=8)
    return runner


def test_each_sample_of_a_slice_is_drawn_as_if_alone(runner: Runner) -> None:
    specs = [SampleSpec(SamplingParams(2.0, seed=seed), 0) for seed in range(6)]
    alone = [runner.run(StepPlan((SequenceSlice("r", PROMPT, 0, (0, 1), (spec,)),)))[0] for spec in specs]
    silent = SequenceSlice("silent", PROMPT, 0, (2, 3))
    greedy = SequenceSlice("greedy", PROMPT, 0, (4, 5), GREEDY * 2)
    together = SequenceSlice("r", PROMPT, 0, (6, 7), tuple(specs))
    answer = runner.run(StepPlan((silent, together, greedy)))
    assert answer[:2] == [(), tuple(token for (token,) in alone)]
    assert len(set(answer[1])) > 1
    assert answer[2][0] == answer[2][1]


def test_a_copied_block_can_be_written_without_harm_to_its_source(runner: Runner) -> None:
    """To the bit: two continuations of one prompt, of which one copied the block that both would write."""
    expected = []
    for token in (30, 31):
        logits = runner.logits(StepPlan((SequenceSlice("whole", (*PROMPT, token, 40), 0, (0, 1), GREEDY),)))
        expected.append(logits[0].clone())
    runner.run(StepPlan((SequenceSlice("trunk", PROMPT, 0, (2, 3)),)))
    runner.kv_pool[4].fill_(7.0)  # what another request left
    first = SequenceSlice("0", (30,), len(PROMPT), (2, 3), GREEDY)
    second = SequenceSlice("1", (31,), len(PROMPT), (2, 4), GREEDY)
    runner.run(StepPlan((first, second), copies=((3, 4),)))
    tables = (first.block_table, second.block_table)
    after = tuple(SequenceSlice(str(table), (40,), first.end, table, GREEDY) for table in tables)
    logits = runner.logits(StepPlan(after))
    assert all(torch.equal(row, wanted) for row, wanted in zip(logits, expected, strict=True))
    assert not torch.equal(*expected)


@pytest.mark.parametrize("copy", [(-1, 0), (0, 8), (8, 0), (0, -1)])
def test_a_copy_out_of_bounds_is_named(runner: Runner, copy: tuple[int, int]) -> None:
    item = SequenceSlice("r", PROMPT, 0, (2, 3))
    with pytest.raises(InvariantBroken, match=f"copy of block {copy[0]} to {copy[1]} in a pool of 8"):
        runner.run(StepPlan((item,), copies=(copy,)))
    assert runner.run(StepPlan((item,), copies=((0, 1),))) == [()]
