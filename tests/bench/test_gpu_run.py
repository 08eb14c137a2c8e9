"""The GPU's check script runs from end to end on a CPU: only the hardware is untested."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench.gpu import checks, run
from bench.gpu.machine import DEFAULT_SIZES, random_weights
from bench.gpu.timing import GREEDY
from engine.gpu.weights import to_device
from engine.model_config import ModelConfig
from engine.models.arithmetic import CpuArithmetic
from engine.models.decoder import DecoderModel
from engine.step import SequenceSlice, StepPlan
from engine.torch_runner import TorchModelRunner
from tests.engine.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("gpu_run") / "model"
    write_tiny_model(folder, num_layers=1, hidden_size=48, num_heads=3, num_kv_heads=1, max_context_tokens=128)
    return ["--device", "cpu", "--quick", "--no-golden", "--model", str(folder)]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted programs are slow: one takes all rows of a tile."""
    monkeypatch.setattr("engine.gpu.arithmetic.ROWS", 128)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_weights_move_to_a_device_and_compute(dtype: torch.dtype) -> None:
    """What --random computes with, in smaller sizes."""
    sizes = {"vocab_size": 300, "hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 2}
    config = ModelConfig.parse(DEFAULT_SIZES | sizes | {"num_attention_heads": 6, "num_key_value_heads": 2})
    weights = to_device(random_weights(config, dtype), torch.device("cpu"))
    runner = TorchModelRunner(DecoderModel(config, weights, CpuArithmetic()), str(dtype)[len("torch.") :], 4, 16)
    logits = runner.logits(StepPlan((SequenceSlice("r", (5, 6), 0, (1,), (GREEDY,)),)))
    assert logits.shape == (1, 300)
    assert logits.isfinite().all()


def test_every_section_passes_and_is_in_the_report(arguments: list[str], tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    status = run.main([*arguments, "--out", str(out)])
    report = json.loads(out.read_text())
    assert report["failed"] == []
    assert status == 0
    sections = report["sections"]
    assert sections["graphs bfloat16"]["equal_to_the_bit"] == {"1": True, "2": True, "4": True}
    assert sections["exact bfloat16"]["exact_batches"]
    assert set(sections["decode bfloat16 exact"]) == {"1", "2", "seconds"}
    assert sections["prefill bfloat16"]["24"]["ms"] > 0


def test_a_section_that_fails_fails_the_run_and_the_rest_go_on(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "report.json"
    monkeypatch.setitem(checks.KERNEL_TOLERANCE, "bfloat16", 0.0)
    for name in ("timing_sections", "exact_sections"):
        monkeypatch.setattr(run, name, lambda *_given: None)
    assert run.main([*arguments, "--out", str(out)]) == 1
    report = json.loads(out.read_text())
    assert report["failed"] == ["kernel bfloat16"]
    assert "AssertionError" in report["sections"]["kernel bfloat16"]["error"]
    assert "largest_difference" in report["sections"]["logits bfloat16"]


def test_what_there_is_no_time_for_is_named(arguments: list[str], tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    assert run.main([*arguments, "--minutes", "0", "--out", str(out)]) == 0
    sections = json.loads(out.read_text())["sections"]
    assert sections["exact bfloat16"] == {"left_out": "no time"}
