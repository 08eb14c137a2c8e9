"""Runners that the engine's tests share: loading weights once keeps the suite quick."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.torch_runner import TorchModelRunner
from tests.engine.tiny_model import write_tiny_model

NUM_BLOCKS = 512


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
