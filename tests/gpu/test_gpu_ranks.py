"""bench/gpu/ranks.py on two GPUs: python -m pytest -m gpu tests/gpu. With fewer it fails: nothing is
skipped. Unrun so far."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.gpu import ranks
from tests.engine.tiny_model import write_tiny_model

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_are_near_one(tmp_path: Path, dtype: str) -> None:
    """A model that two ranks can share, of random weights."""
    sizes = {"hidden_size": 1024, "num_heads": 16, "num_kv_heads": 8}
    folder = write_tiny_model(tmp_path / "model", vocab_size=8192, num_layers=8, max_context_tokens=4096, **sizes)
    arguments = ["--model", str(folder), "--dtype", dtype, "--out", str(tmp_path / "report.json")]
    assert ranks.main([*arguments, "--num-blocks", "2048"]) == 0
