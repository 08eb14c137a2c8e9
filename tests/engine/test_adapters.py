"""LoRA adapters in every runner. Beneath them weights may be blocks: tests/engine/cpu/test_quantised_model.py."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from core.errors import BadModel, BadRequest, InvariantBroken
from core.identity import Adapter
from core.request import GenerateRequest, StopConditions
from engine.adapter import load_adapters
from engine.adapter_check import require_finite
from engine.adapter_config import TARGETS
from engine.block_pool import BlockPool
from engine.cpu.build import PORTABLE, build_library
from engine.cpu.library import KernelLibrary
from engine.cpu.runner import CpuModelRunner
from engine.model_config import ModelConfig
from engine.scheduler import Scheduler
from engine.scheduler_config import SchedulerConfig
from engine.sequence import ModelLimits
from engine.step import SequenceSlice, StepPlan
from engine.weights import load_weights
from tests.engine.conftest import LOADERS, Load
from tests.engine.engine_run import EngineRun
from tests.engine.invariance import assert_batches_agree, assert_chunks_agree, forced_prompts
from tests.engine.random_adapters import merge, some_adapters, write_adapter
from tests.engine.random_models import CASES, VOCAB_SIZE, Case, greedy_reference, random_model, save
from tests.engine.token_stream import GREEDY, generate, pooled_sequences, prefill

SOME_CASES = [case for case in CASES if case.name in ("llama-6-2", "qwen2-6-2", "qwen3-6-2-head-32")]
NUM_TOKENS = 8
SMALLEST_GAP = 1e-3  # between the reference's two best logits: far above what the order of sums can change
LOGIT_BOUND = 2e-4
MIX = ("a", "", "b", "a", "", "attention")  # neighbours alike and not


def _load_portable(folder: Path, dtype: str, adapters: Mapping[str, Path]) -> CpuModelRunner:
    config, torch_dtype = ModelConfig.load(folder), getattr(torch, dtype)
    library = KernelLibrary(build_library(target_flags=PORTABLE))
    weights, loaded = load_weights(folder, config, torch_dtype), load_adapters(adapters, config, torch_dtype)
    return CpuModelRunner(config, weights, dtype, 256, 16, library, loaded)


@pytest.mark.parametrize("case", SOME_CASES, ids=[case.name for case in SOME_CASES])
def test_an_adapter_says_what_the_merged_model_says(load: Load, case: Case, tmp_path: Path) -> None:
    """For each target, and all: what transformers says whose weights hold the adapter."""
    model_folder = save(random_model(case), tmp_path / "model")
    targets = {**{name: (name,) for name in TARGETS}, "all": tuple(TARGETS)}
    more = {"all": {"use_rslora": True, "lora_alpha": 3}}
    folders = {
        name: write_adapter(tmp_path / name, model_folder, chosen, rank=4, seed=case.seed, **more.get(name, {}))
        for name, chosen in targets.items()
    }
    runner = load(model_folder, "float32", folders)
    order = random.Random(11)
    prompt = [order.randrange(VOCAB_SIZE) for _ in range(37)]
    base = greedy_reference(random_model(case), prompt, 1)[1][0]
    for name, adapter in folders.items():
        reference = random_model(case)
        merge(reference, adapter, 3 / 4**0.5 if name == "all" else 2.0)
        tokens, rows = greedy_reference(reference, prompt, NUM_TOKENS)
        assert rows.topk(2).values.diff().abs().min() > SMALLEST_GAP, "the case's seed gives a tie: take another one"
        [sequence] = pooled_sequences(runner, [prompt], 0, random.Random(0), (name,))
        found = prefill(runner, sequence, 16)
        torch.testing.assert_close(found, rows[0], rtol=LOGIT_BOUND, atol=LOGIT_BOUND)
        assert (found - base).abs().max() > 100 * LOGIT_BOUND, name  # positive control: it does change something
        assert generate(runner, [prompt], [NUM_TOKENS], 16, (name,)) == [tokens]


@pytest.mark.parametrize("load", [*LOADERS, _load_portable])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mixed_batches_do_not_change_a_bit(load: Load, tiny_folder: Path, dtype: str, tmp_path: Path) -> None:
    """To the bit, in any chunk and batch, beside other adapters and none; a base request is as if none were loaded."""
    runner = load(tiny_folder, dtype, some_adapters(tmp_path, tiny_folder))
    assert_chunks_agree(runner, (3, 97), (1, 37), ("a", "b"))
    assert_batches_agree(runner, (1, 2, 17, 31, 64, 95, 97, 129), MIX)
    bare = load(tiny_folder, dtype, {})
    prompt = forced_prompts(bare.vocab_size, (70,))[0]
    logits = []
    for either, adapter in ((bare, ""), (runner, ""), (runner, "a"), (runner, "b")):
        [sequence] = pooled_sequences(either, [prompt], 0, random.Random(0), (adapter,))
        logits.append(prefill(either, sequence, 200))
    assert torch.equal(logits[0], logits[1])
    assert not any(torch.equal(logits[0], other) for other in logits[2:])
    assert not torch.equal(logits[2], logits[3])


def test_scheduled_requests_say_what_they_say_alone(load: Load, tiny_folder: Path, tmp_path: Path) -> None:
    """Through the scheduler: with preemption, prefix hits and company each says what it says alone. A hit never
    crosses from an adapter to another one, or to the base."""
    folders = some_adapters(tmp_path, tiny_folder)
    runner = load(tiny_folder, "float32", folders)
    known = [Adapter(f"name-{digest}", digest) for digest in folders]
    prompt = tuple(forced_prompts(runner.vocab_size, (85,))[0])
    requests = [
        GenerateRequest(
            f"{number}-{adapter.name if adapter else 'base'}",
            prompt,
            GREEDY,
            StopConditions(max_tokens=12, ignore_eos=True),
            adapter=adapter,
        )
        for number in range(2)
        for adapter in (None, *known)
    ]
    config = SchedulerConfig(token_budget=48)
    alone = {
        request.request_id: EngineRun(runner, adapters=known).generate([request], config)[request.request_id]
        for request in requests
    }
    assert len({tuple(output) for output in alone.values()}) == 1 + len(known)
    disturbed = EngineRun(runner, adapters=known)
    assert disturbed.generate(requests, config, disturb=random.Random(5)) == alone
    assert disturbed.num_preemptions
    one_by_one = EngineRun(runner, adapters=known)
    for request in requests:
        assert one_by_one.generate([request], config) == {request.request_id: alone[request.request_id]}
        first = request.request_id.startswith("0")
        assert one_by_one.cached_tokens[request.request_id] == (0 if first else (len(prompt) - 1) // 16 * 16)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_that_cannot_be_computed_is_found(load: Load, tiny_folder: Path, dtype: str, tmp_path: Path) -> None:
    """Finite weights, but what they give is not: found before a request has the adapter."""
    good = write_adapter(tmp_path / "good", tiny_folder)
    large = write_adapter(tmp_path / "large", tiny_folder, strength=1e30)
    runner = load(tiny_folder, dtype, {"good": good, "large": large})
    require_finite(runner, {"good": good})
    with pytest.raises(BadModel, match=f"{large}: cannot be computed: the model's logits hold a NaN"):
        require_finite(runner, {"good": good, "large": large})


def test_a_slice_of_an_adapter_that_is_not_loaded_is_named(load: Load, tiny_folder: Path) -> None:
    runner = load(tiny_folder, "float32", {})
    with pytest.raises(InvariantBroken, match="request r: its adapter is not loaded"):
        runner.run(StepPlan((SequenceSlice("r", (1,), 0, (0,), adapter_digest="a"),)))


def test_a_worker_takes_no_adapter_that_it_lacks_or_has_otherwise() -> None:
    ours = Adapter("poet", "d1")
    limits = ModelLimits(16, 1024, (2,))
    scheduler = Scheduler(SchedulerConfig(), BlockPool(8), limits, b"d" * 32, _no_watch, adapters=[ours])
    stop = StopConditions(max_tokens=2)

    def ask(adapter: Adapter | None) -> bytes:
        return scheduler.new_sequence(GenerateRequest("r", (1, 2), GREEDY, stop, adapter=adapter)).namespace

    assert ask(ours) != ask(None)  # both are taken
    with pytest.raises(BadRequest, match=r"adapter\.name: 'prose' is not loaded"):
        ask(Adapter("prose", "d1"))
    with pytest.raises(
        BadRequest, match=r"adapter\.digest: 'poet' has other content on this worker: ours d1, theirs d2"
    ):
        ask(Adapter("poet", "d2"))


def _no_watch(_request: GenerateRequest) -> None:
    raise AssertionError
