"""What ranks cannot share is refused by the field's name, before weights are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.errors import BadRequest
from engine.load_runner import load_runner
from tests.engine.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def folder_without_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_model(tmp_path_factory.mktemp("load") / "tiny", vocab_size=260)
    (folder / "model.safetensors").unlink()
    return folder


@pytest.mark.parametrize(
    ("engine", "size", "problem"),
    [
        ("torch", 3, "tensor_parallel_size: 3 does not divide the model's num_kv_heads, 2"),
        ("cpu", 2, "tensor_parallel_size: 2 wants GPUs, or TANDEM_ENGINE=torch"),
    ],
)
def test_refused(
    folder_without_weights: Path, monkeypatch: pytest.MonkeyPatch, engine: str, size: int, problem: str
) -> None:
    monkeypatch.setenv("TANDEM_ENGINE", engine)
    with pytest.raises(BadRequest, match=problem):
        load_runner(folder_without_weights, "float32", 8, 16, tensor_parallel_size=size)
