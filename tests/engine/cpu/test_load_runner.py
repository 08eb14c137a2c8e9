"""Which engine computes, and that a fallback is said. On a machine without a GPU."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from core.errors import BadRequest
from engine.cpu import build
from engine.cpu.build import KernelsUnavailable
from engine.cpu.runner import CpuModelRunner
from engine.load_runner import load_runner
from engine.torch_runner import TorchModelRunner
from tests.engine.tiny_model import write_tiny_model


@pytest.fixture(autouse=True)
def no_forced_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TANDEM_ENGINE", raising=False)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))


@pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler")
def test_kernels_are_the_default(tiny_folder: Path) -> None:
    assert isinstance(load_runner(tiny_folder, "float32", 8, 16), CpuModelRunner)


def test_without_a_compiler_torch_computes_and_it_is_said(
    tiny_folder: Path, no_compiler: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        runner = load_runner(tiny_folder, "float32", 8, 16)
    assert isinstance(runner, TorchModelRunner)
    assert "no C++ compiler: none of no-such-compiler is on PATH; torch computes instead" in caplog.text


@pytest.mark.parametrize(
    ("block_size", "hidden_size", "reason"), [(32, 96, "block_size is 32"), (16, 72, "hidden_size 72")]
)
def test_what_the_kernels_do_not_take_goes_to_torch(
    block_size: int, hidden_size: int, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_tiny_model(tmp_path / "model", hidden_size=hidden_size)
    with caplog.at_level(logging.WARNING):
        assert isinstance(load_runner(folder, "float32", 8, block_size), TorchModelRunner)
    assert reason in caplog.text


def test_the_variable_forces_an_engine(tiny_folder: Path, no_compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_ENGINE", "torch")
    assert isinstance(load_runner(tiny_folder, "float32", 8, 16), TorchModelRunner)
    monkeypatch.setenv("TANDEM_ENGINE", "cpu")
    with pytest.raises(KernelsUnavailable, match="no C\\+\\+ compiler"):
        load_runner(tiny_folder, "float32", 8, 16)
    monkeypatch.setenv("TANDEM_ENGINE", "tpu")
    with pytest.raises(BadRequest, match="TANDEM_ENGINE: must be one of cpu, gpu, torch, got 'tpu'"):
        load_runner(tiny_folder, "float32", 8, 16)


def test_a_gpu_is_taken_where_there_is_one_and_missed_where_it_is_asked_for(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_ENGINE", "gpu")
    with pytest.raises(BadRequest, match="TANDEM_ENGINE: gpu, but torch sees none"):
        load_runner(tiny_folder, "float32", 8, 16)
    loaded: list[tuple[object, ...]] = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("engine.gpu.runner.GpuModelRunner.load", lambda *given, **_rest: loaded.append(given))
    for value in ("gpu", ""):
        monkeypatch.setenv("TANDEM_ENGINE", value)
        load_runner(tiny_folder, "float32", 8, 16, gpu_index=3)
    assert [given[-1] for given in loaded] == [3, 3]
    monkeypatch.setenv("TANDEM_ENGINE", "torch")
    assert isinstance(load_runner(tiny_folder, "float32", 8, 16), TorchModelRunner)
