"""The GPU's check script runs from end to end on a CPU: only the hardware is untested."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.gpu import checks, run
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
