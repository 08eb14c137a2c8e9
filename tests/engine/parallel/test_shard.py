"""Ranks that share a model say what one says, to the bit: nothing is summed across ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from core.errors import BadRequest
from core.request import SamplingParams
from engine.gpu.runner import GpuModelRunner
from engine.model_config import ModelConfig
from engine.models.decoder import Gather, alone
from engine.parallel.shard import WHOLE, Shard, plan_for_ranks, require_split
from engine.step import SampleSpec, ScoreSpec, SequenceSlice, StepPlan
from engine.torch_runner import TorchModelRunner
from engine.weights import load_weights
from tests.engine.gpu.host_runner import load_host_gpu
from tests.engine.parallel.thread_ranks import ThreadRanks
from tests.engine.random_adapters import some_adapters
from tests.engine.random_models import CASES, VOCAB_SIZE, random_model, save
from tests.engine.token_stream import pooled_sequences, prefill

NUM_BLOCKS = 64
LENGTHS = (1, 17, 60, 133)
SPLIT_CASES = [case for case in CASES if case.num_kv_heads > 1]
GREEDY = SampleSpec(SamplingParams(temperature=0.0), 0)


@pytest.fixture(scope="module", autouse=True)
def one_thread_a_rank() -> Iterator[None]:
    """As workers have; ranks that are threads, and theirs, would wait for each other's cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=SPLIT_CASES, ids=[case.name for case in SPLIT_CASES])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(request.param), tmp_path_factory.mktemp("models") / request.param.name)


def torch_runner(
    folder: Path, dtype: str, shard: Shard = WHOLE, gather: Gather = alone, adapters: Mapping[str, Path] | None = None
) -> TorchModelRunner:
    return TorchModelRunner.load(folder, dtype, NUM_BLOCKS, shard=shard, gather=gather, adapters=adapters)


def gpu_runner(
    folder: Path, dtype: str, shard: Shard = WHOLE, gather: Gather = alone, adapters: Mapping[str, Path] | None = None
) -> GpuModelRunner:
    """Its graphs, buckets and layouts, on the host."""
    return load_host_gpu(folder, dtype, adapters, num_blocks=NUM_BLOCKS, shard=shard, gather=gather)


def step_logits(runner: Any, adapters: Sequence[str] = ("",)) -> list[torch.Tensor]:
    """Prompts in chunks, one by one; then decodes of 4, 3 and 1 sequences; then a prefill beside decodes."""
    order = random.Random(5)
    prompts = [[order.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]
    sequences = pooled_sequences(runner, prompts, 8, random.Random(1), adapters)
    rows = [prefill(runner, sequence, 48) for sequence in sequences]
    for count in (4, 3, 1):
        for sequence in sequences[:count]:
            sequence.token_ids.append(7 + count)
        plan = StepPlan(tuple(sequence.next_slice(1) for sequence in sequences[:count]))
        rows.extend(runner.logits(plan).clone())
    sequences[3].token_ids += [9, 8, 7]
    sequences[0].token_ids.append(5)
    rows.extend(runner.logits(StepPlan((sequences[3].next_slice(3), sequences[0].next_slice(1)))))
    return rows


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("make", "head_dimension"), [(torch_runner, 3), (gpu_runner, 4)])
def test_two_ranks_compute_the_bits_of_one(
    folder: Path, dtype: str, make: Callable[..., Any], head_dimension: int
) -> None:
    one, two = make(folder, dtype), ThreadRanks(2, partial(make, folder, dtype))
    expected = step_logits(one)
    for got, wanted in zip(step_logits(two), expected, strict=True):
        assert torch.equal(got, wanted)
    assert torch.equal(torch.cat([rank.kv_pool for rank in two.runners], dim=head_dimension), one.kv_pool)
    assert len({tuple(row.tolist()) for row in expected}) == len(expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("make", [torch_runner, gpu_runner])
def test_two_ranks_compute_the_bits_of_one_with_adapters(
    folder: Path, dtype: str, make: Callable[..., Any], tmp_path: Path
) -> None:
    """Beside each other and the model alone; their thin inner products are whole on every rank."""
    adapters = some_adapters(tmp_path, folder)
    mix = ("a", "", "b", "attention")
    part = partial(make, folder, dtype, adapters=adapters)
    one, two = part(), ThreadRanks(2, part)
    expected = step_logits(one, mix)
    for got, wanted in zip(step_logits(two, mix), expected, strict=True):
        assert torch.equal(got, wanted)
    plain = step_logits(one)
    assert [torch.equal(*rows) for rows in zip(expected[:4], plain[:4], strict=True)] == [not name for name in mix]


def test_a_rank_holds_its_share(folder: Path) -> None:
    """Of every matrix; the embedding and the norms are whole."""
    config = ModelConfig.load(folder)
    whole = load_weights(folder, config, torch.float32)
    first, second = (load_weights(folder, config, torch.float32, shard=Shard(rank, 2)) for rank in range(2))
    for name in ("output", "down"):
        halves = [getattr(weights.layers[0], name) for weights in (first, second)]
        assert torch.equal(torch.cat(halves), getattr(whole.layers[0], name))
    query_rows = config.num_heads * config.head_dim
    assert torch.equal(second.layers[0].qkv[: query_rows // 2], whole.layers[0].qkv[query_rows // 2 : query_rows])
    assert torch.equal(second.layers[0].gate_up[:80], whole.layers[0].gate_up[80:160])
    assert torch.equal(torch.cat((first.head, second.head)), whole.head)
    assert torch.equal(second.embedding, whole.embedding)


@pytest.mark.parametrize("name", ["num_kv_heads", "hidden_size", "intermediate_size", "vocab_size"])
def test_a_size_that_cannot_be_split_is_named(folder: Path, name: str) -> None:
    config = replace(ModelConfig.load(folder), num_heads=12, num_kv_heads=12)
    require_split(config, 4)
    odd = replace(config, **{name: getattr(config, name) + 2})
    with pytest.raises(BadRequest, match=f"tensor_parallel_size: 4 does not divide the model's {name}"):
        require_split(odd, 4)


def test_ranks_are_told_rows_and_nothing_of_what_is_drawn() -> None:
    secret = SampleSpec(SamplingParams(temperature=1.0), 3, output_token_ids=(4, 5))
    item = SequenceSlice("r", (1, 2, 3), 0, (0,), (ScoreSpec(0, 2, 5), GREEDY, secret))
    plan = plan_for_ranks(StepPlan((item, SequenceSlice("s", (4,), 0, (1,))), copies=((2, 3),)))
    assert [told.logit_rows for told in plan.slices] == [[0, 2, 2], []]
    assert {type(spec) for spec in plan.samples} == {ScoreSpec}
    assert plan.copies == ((2, 3),)
