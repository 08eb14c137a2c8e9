"""Runners that the engine's tests share: loading weights once keeps the suite quick."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from engine.cpu.runner import CpuModelRunner
from engine.torch_runner import TorchModelRunner
from tests.engine.gpu.host_runner import load_host_gpu
from tests.engine.tiny_model import write_tiny_model

NUM_BLOCKS = 512
Load = Callable[[Path, str, Mapping[str, Path]], Any]  # folder, dtype, adapters by digest: to a runner


def _load_torch(folder: Path, dtype: str, adapters: Mapping[str, Path]) -> TorchModelRunner:
    return TorchModelRunner.load(folder, dtype, NUM_BLOCKS, adapters=adapters)


def _load_kernels(folder: Path, dtype: str, adapters: Mapping[str, Path]) -> CpuModelRunner:
    return CpuModelRunner.load(folder, dtype, NUM_BLOCKS, adapters=adapters)


LOADERS: tuple[Load, ...] = (_load_torch, _load_kernels, load_host_gpu)


@pytest.fixture(params=LOADERS)
def load(request: pytest.FixtureRequest) -> Load:
    """Loads a model into one of our runners."""
    loader: Load = request.param
    return loader


@pytest.fixture(scope="session")
def default_runner(model_folder: Path) -> TorchModelRunner:
    """The default model in float32. Tests may leave anything in its pool."""
    return TorchModelRunner.load(model_folder, "float32", NUM_BLOCKS)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model; read only."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session", params=["float32", "bfloat16"])
def tiny_runner(request: pytest.FixtureRequest, tiny_folder: Path) -> TorchModelRunner:
    """The tiny model in either dtype."""
    return TorchModelRunner.load(tiny_folder, request.param, NUM_BLOCKS)
