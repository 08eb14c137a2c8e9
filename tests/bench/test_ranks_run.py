"""The check of ranks on GPUs runs from end to end on a CPU: only the hardware is untested."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.gpu import ranks
from tests.engine.tiny_model import write_tiny_model


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    folder = write_tiny_model(tmp_path / "tiny", vocab_size=260)
    monkeypatch.setenv("TANDEM_ENGINE", "torch")  # the run sets it: restored afterwards
    return ["--quick", "--num-blocks", "32", "--model", str(folder), "--out", str(tmp_path / "report.json")]


def test_ranks_are_compared_with_one_and_timed(arguments: list[str], tmp_path: Path) -> None:
    assert ranks.main([*arguments, "--device", "cpu"]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert all(figures["equal_to_the_bit"] for figures in report["logits"].values())
    assert report["kv"]["equal_to_the_bit"]
    assert set(report["decode"]["batch 2"]) == {"one_ms", "ranks_ms"}


def test_fewer_gpus_than_ranks_are_refused_and_nothing_is_said_to_be_checked(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match=r"--size 99 wants as many GPUs, torch sees .*: nothing was checked"):
        ranks.main([*arguments, "--size", "99"])
