from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from core.errors import BadModel, BadRequest
from engine.export import export_floats
from engine.gguf_import import import_gguf
from engine.model_config import ModelConfig
from engine.tokenizer import Tokenizer
from engine.weights import load_weights
from tests.engine.blocks import gguf_type
from tests.engine.gguf_files import CONFIG, model_fields, tokenizer_fields, write_gguf
from tests.engine.tiny_model import tiny_tensors


def _silent(_line: str) -> None:
    pass


@pytest.fixture
def blocks(tmp_path: Path) -> Path:
    """A folder with blocks."""
    fields = model_fields("llama", CONFIG) | tokenizer_fields()
    source = write_gguf(tmp_path / "model.gguf", "llama", fields, tiny_tensors(CONFIG, seed=5), gguf_type("Q4_1"))
    return import_gguf(source, tmp_path / "blocks", _silent)


def test_others_read_the_floats_and_refuse_the_blocks(blocks: Path, tmp_path: Path) -> None:
    floats = export_floats(blocks, tmp_path / "floats", "float32", _silent)
    expected = load_weights(blocks, ModelConfig.load(blocks), torch.float32)
    model = AutoModelForCausalLM.from_pretrained(floats)
    assert torch.equal(model.model.layers[0].mlp.down_proj.weight, expected.layers[0].down)
    assert torch.equal(model.model.embed_tokens.weight, expected.embedding)
    assert Tokenizer.load(floats).encode("hi 12") == Tokenizer.load(blocks).encode("hi 12")
    with pytest.raises(RuntimeError):  # it says "Unknown quantization type", and finds other shapes than it needs
        AutoModelForCausalLM.from_pretrained(blocks)


def test_bfloat16(blocks: Path, tmp_path: Path) -> None:
    floats = export_floats(blocks, tmp_path / "floats", "bfloat16", _silent)
    assert {tensor.dtype for tensor in load_file(floats / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((floats / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_refusals(blocks: Path, tmp_path: Path) -> None:
    with pytest.raises(BadModel, match="exists already"):
        export_floats(blocks, blocks, "float32", _silent)
    with pytest.raises(BadRequest, match="dtype: must be one of float32, bfloat16, got 'int8'"):
        export_floats(blocks, tmp_path / "floats", "int8", _silent)
    (blocks / "model.safetensors").unlink()
    with pytest.raises(BadModel, match="model\\.safetensors"):
        export_floats(blocks, tmp_path / "floats", "float32", _silent)
    assert not (tmp_path / "floats").exists()


def test_folders_made_apart_are_the_same_to_the_byte(blocks: Path, tmp_path: Path) -> None:
    """Workers whose weights differ by a byte do not pair, and each host may make its folder for itself."""
    again = import_gguf(tmp_path / "model.gguf", tmp_path / "again", _silent)
    files = sorted(path.name for path in blocks.iterdir())
    assert files == sorted(path.name for path in again.iterdir())
    assert [name for name in files if (blocks / name).read_bytes() != (again / name).read_bytes()] == []
    with safe_open(again / "model.safetensors", "pt") as file:
        assert len(file.metadata()) > 8  # in how many orders they could have been
