"""What every runner must do with adapters; tests/engine/test_adapters.py and tests/engine/cpu/test_adapted_kernels.py
ask it of theirs."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from core.errors import BadModel
from core.identity import Adapter
from core.request import GenerateRequest, StopConditions
from engine.adapter_check import require_finite
from engine.adapter_config import TARGETS
from engine.scheduler_config import SchedulerConfig
from engine.torch_runner import TorchModelRunner
from tests.engine.engine_run import EngineRun
from tests.engine.invariance import assert_batches_agree, assert_chunks_agree, forced_prompts
from tests.engine.random_adapters import merge, write_adapter
from tests.engine.random_models import VOCAB_SIZE, Case, greedy_reference, random_model, save
from tests.engine.token_stream import GREEDY, generate, pooled_sequences, prefill

Load = Callable[[Path, str, Mapping[str, Path]], TorchModelRunner]  # folder, dtype, adapters

NUM_TOKENS = 8
SMALLEST_GAP = 1e-3  # between the reference's two best logits: far above what the order of sums can change
LOGIT_BOUND = 2e-4
MIX = ("a", "", "b", "a", "", "attention")  # neighbours alike and not


def assert_merged_model_agrees(load: Load, case: Case, folder: Path) -> None:
    """For each target, and all: what transformers says whose weights hold the adapter."""
    model_folder = save(random_model(case), folder / "model")
    targets = {**{name: (name,) for name in TARGETS}, "all": tuple(TARGETS)}
    more = {"all": {"use_rslora": True, "lora_alpha": 3}}
    folders = {
        name: write_adapter(folder / name, model_folder, chosen, rank=4, seed=case.seed, **more.get(name, {}))
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


def assert_mixed_batches_agree(load: Load, model_folder: Path, dtype: str, folder: Path) -> None:
    """To the bit, in any chunk and batch, beside other adapters and none; a base request is as if none were loaded."""
    runner = load(model_folder, dtype, adapters(model_folder, folder))
    assert_chunks_agree(runner, (3, 97), (1, 37), ("a", "b"))
    assert_batches_agree(runner, (1, 2, 17, 31, 64, 95, 97, 129), MIX)
    bare = load(model_folder, dtype, {})
    prompt = forced_prompts(bare.vocab_size, (70,))[0]
    logits = []
    for either, adapter in ((bare, ""), (runner, ""), (runner, "a"), (runner, "b")):
        [sequence] = pooled_sequences(either, [prompt], 0, random.Random(0), (adapter,))
        logits.append(prefill(either, sequence, 200))
    assert torch.equal(logits[0], logits[1])
    assert not any(torch.equal(logits[0], other) for other in logits[2:])
    assert not torch.equal(logits[2], logits[3])


def assert_scheduled_requests_agree(load: Load, model_folder: Path, folder: Path) -> None:
    """Through the scheduler: with preemption, prefix hits and company each says what it says alone. A hit never
    crosses from an adapter to another one, or to the base."""
    folders = adapters(model_folder, folder)
    runner = load(model_folder, "float32", folders)
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


def assert_overflow_is_found(load: Load, model_folder: Path, folder: Path) -> None:
    """Finite weights, but what they give is not: found before a request has the adapter."""
    good = write_adapter(folder / "good", model_folder)
    large = write_adapter(folder / "large", model_folder, strength=1e30)
    for dtype in ("float32", "bfloat16"):
        runner = load(model_folder, dtype, {"good": good, "large": large})
        require_finite(runner, {"good": good})
        with pytest.raises(BadModel, match=f"{large}: cannot be computed: logits hold a NaN"):
            require_finite(runner, {"good": good, "large": large})


def adapters(model_folder: Path, folder: Path) -> dict[str, Path]:
    """Two of all targets, of other ranks, and one of some."""
    return {
        "a": write_adapter(folder / "a", model_folder, rank=3, seed=1),
        "b": write_adapter(folder / "b", model_folder, rank=17, seed=2),
        "attention": write_adapter(folder / "attention", model_folder, ("q_proj", "v_proj"), rank=8, seed=3),
    }
