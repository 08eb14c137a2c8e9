"""LoRA adapters in the CPU kernels. Beneath them weights may be blocks: test_quantised_model.py."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from core.errors import InvariantBroken
from engine.adapter import load_adapters
from engine.cpu.build import PORTABLE, build_library
from engine.cpu.library import KernelLibrary
from engine.cpu.runner import CpuModelRunner
from engine.model_config import ModelConfig
from engine.step import SequenceSlice, StepPlan
from engine.weights import load_weights
from tests.engine.adapted import (
    assert_merged_model_agrees,
    assert_mixed_batches_agree,
    assert_overflow_is_found,
    assert_scheduled_requests_agree,
)
from tests.engine.random_models import CASES, Case

SOME_CASES = [case for case in CASES if case.name in ("llama-6-2", "qwen2-6-2", "qwen3-6-2-head-32")]


def _load(folder: Path, dtype: str, adapters: Mapping[str, Path]) -> CpuModelRunner:
    return CpuModelRunner.load(folder, dtype, 256, adapters=adapters)


def _load_portable(folder: Path, dtype: str, adapters: Mapping[str, Path]) -> CpuModelRunner:
    config, torch_dtype = ModelConfig.load(folder), getattr(torch, dtype)
    library = KernelLibrary(build_library(target_flags=PORTABLE))
    weights, loaded = load_weights(folder, config, torch_dtype), load_adapters(adapters, config, torch_dtype)
    return CpuModelRunner(config, weights, dtype, 256, 16, library, loaded)


@pytest.mark.parametrize("case", SOME_CASES, ids=[case.name for case in SOME_CASES])
def test_an_adapter_says_what_the_merged_model_says(case: Case, tmp_path: Path) -> None:
    assert_merged_model_agrees(_load, case, tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mixed_batches_do_not_change_a_bit(tiny_folder: Path, dtype: str, tmp_path: Path) -> None:
    assert_mixed_batches_agree(_load, tiny_folder, dtype, tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_portable_kernels_do_not_change_a_bit(tiny_folder: Path, dtype: str, tmp_path: Path) -> None:
    assert_mixed_batches_agree(_load_portable, tiny_folder, dtype, tmp_path)


def test_scheduled_requests_say_what_they_say_alone(tiny_folder: Path, tmp_path: Path) -> None:
    assert_scheduled_requests_agree(_load, tiny_folder, tmp_path)


def test_an_adapter_that_cannot_be_computed_is_found(tiny_folder: Path, tmp_path: Path) -> None:
    assert_overflow_is_found(_load, tiny_folder, tmp_path)


def test_a_slice_of_an_adapter_that_is_not_loaded_is_named(tiny_folder: Path) -> None:
    runner = _load(tiny_folder, "float32", {})
    with pytest.raises(InvariantBroken, match="request r: its adapter is not loaded"):
        runner.run(StepPlan((SequenceSlice("r", (1,), 0, (0,), adapter_digest="a"),)))
