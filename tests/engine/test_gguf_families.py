"""GGUFs of every family and kind of storage become the model that they were made from."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file

from core.errors import BadModel
from engine.gguf_import import import_gguf
from engine.gguf_tensors import FLOATS
from engine.model_config import BLOCKS_CONFIG, ModelConfig
from engine.quantisation import BLOCK_KINDS
from engine.rope import llama3_frequencies, plain_frequencies
from engine.rope_scaling import Llama3Scaling, YarnScaling
from engine.torch_runner import TorchModelRunner
from engine.weights import read_tensors
from tests.engine.gguf_files import F32, gguf_name, model_fields, tokenizer_fields, write_gguf
from tests.engine.random_models import CASES, VOCAB_SIZE, Case, random_model, save
from tests.engine.token_stream import pooled_sequences, prefill

KINDS = gguf.GGMLQuantizationType
MATRIX_TYPES = (KINDS.F32, KINDS.F16, KINDS.BF16, KINDS.Q8_0, KINDS.Q4_0, KINDS.Q4_1, KINDS.Q5_0)
PLAIN_CASES = [case for case in CASES if not case.rope and case.kind != "mistral"]  # one of each architecture
FACTORS = "rope_freqs.weight"


@pytest.fixture(scope="module", params=PLAIN_CASES, ids=[case.name for case in PLAIN_CASES])
def original(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, Path]:
    case: Case = request.param
    return case, save(random_model(case), tmp_path_factory.mktemp("originals") / case.kind)


def _config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def _fields(architecture: str, folder: Path, **own: object) -> dict[str, object]:
    extra = {f"{architecture}.{name}": value for name, value in own.items()}
    return model_fields(architecture, _config(folder)) | tokenizer_fields(VOCAB_SIZE, "qwen2") | extra


def _import(path: Path, architecture: str, fields: dict[str, object], tensors: Any, kind: Any = F32) -> Path:
    return import_gguf(
        write_gguf(path / "model.gguf", architecture, fields, tensors, kind), path / "model", lambda _line: None
    )


def _logits(folder: Path) -> torch.Tensor:
    runner = TorchModelRunner.load(folder, "float32", 16)
    prompt = [random.Random(3).randrange(VOCAB_SIZE) for _ in range(40)]
    [sequence] = pooled_sequences(runner, [prompt], 0, random.Random(0))
    return prefill(runner, sequence, 16)


def test_a_float32_file_is_the_same_model(original: tuple[Case, Path], tmp_path: Path) -> None:
    case, folder = original
    tensors = load_file(folder / "model.safetensors")
    imported = _import(tmp_path, case.kind, _fields(case.kind, folder), tensors)
    found = load_file(imported / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert torch.equal(_logits(imported), _logits(folder))


@pytest.mark.parametrize("kind", MATRIX_TYPES, ids=[kind.name for kind in MATRIX_TYPES])
def test_matrices_are_what_gguf_dequantises(original: tuple[Case, Path], tmp_path: Path, kind: Any) -> None:
    """Names and rows are the test above; here the values, by a tensor that no family permutes."""
    case, folder = original
    tensors = load_file(folder / "model.safetensors")
    imported = _import(tmp_path, case.kind, _fields(case.kind, folder), tensors, kind)
    found = read_tensors(imported, ModelConfig.load(imported), torch.float32)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    stored = {tensor.name: tensor for tensor in reader.tensors}
    name = "model.layers.2.mlp.down_proj.weight"
    tensor = stored[gguf_name(case.kind, name)]
    assert tensor.tensor_type == kind
    assert torch.equal(found[name], torch.from_numpy(gguf.dequantize(tensor.data, kind).copy()).float())
    # Quantisation works within a row, so that the order of rows does not change it: queries are close, too.
    query = "model.layers.2.self_attn.q_proj.weight"
    error = (found[query] - tensors[query]).norm() / tensors[query].norm()
    assert error < {"F32": 1e-9, "F16": 1e-3, "BF16": 1e-2, "Q8_0": 1e-2}.get(kind.name, 0.12)
    assert TorchModelRunner.load(imported, "float32", 4).vocab_size == VOCAB_SIZE
    written = load_file(imported / "model.safetensors")[name].dtype
    assert written == (torch.uint8 if kind.name in BLOCK_KINDS else FLOATS.get(kind.name, torch.float32))
    assert _config(imported).get("quantization_config") == (BLOCKS_CONFIG if kind.name in BLOCK_KINDS else None)


def test_a_damaged_type_is_named(original: tuple[Case, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, folder = original

    def refuse(*_: object) -> None:
        raise NotImplementedError("not yet")

    monkeypatch.setattr(gguf, "dequantize", refuse)
    with pytest.raises(BadModel, match=r"tensor .*: Q5_0 cannot be dequantised: not yet"):
        tensors = load_file(folder / "model.safetensors")
        _import(tmp_path, case.kind, _fields(case.kind, folder), tensors, KINDS.Q5_0)


def test_missing_tensors_of_the_family_are_named(original: tuple[Case, Path], tmp_path: Path) -> None:
    case, folder = original
    tensors = load_file(folder / "model.safetensors")
    name = {"llama": "q_proj.weight", "qwen2": "k_proj.bias", "qwen3": "k_norm.weight"}[case.kind]
    del tensors[f"model.layers.1.self_attn.{name}"]
    stored = {"llama": "attn_q.weight", "qwen2": "attn_k.bias", "qwen3": "attn_k_norm.weight"}[case.kind]
    with pytest.raises(BadModel, match=rf"missing tensors: blk\.1\.{stored}$"):
        _import(tmp_path, case.kind, _fields(case.kind, folder), tensors)


def test_scaling_fields(original: tuple[Case, Path], tmp_path: Path) -> None:
    case, folder = original
    own = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
        "rope.scaling.yarn_beta_fast": 16.0,
        "rope.freq_base": 1e6,
    }
    fields = _fields(case.kind, folder, **own)
    runner = TorchModelRunner.load(
        _import(tmp_path, case.kind, fields, load_file(folder / "model.safetensors")), "float32", 4
    )
    scaling = runner.config.rope_scaling
    assert isinstance(scaling, YarnScaling)
    assert (scaling.factor, scaling.original_context_tokens, scaling.beta_fast) == (4.0, 64, 16.0)
    assert runner.config.rope_theta == 1e6


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recognised(original: tuple[Case, Path], tmp_path: Path, factor: float) -> None:
    case, folder = original
    scaling = Llama3Scaling(factor, 1.0, 4.0, 8192)
    plain = plain_frequencies(5e5, _config(folder)["head_dim"] if case.kind != "qwen2" else 16)
    divisors = plain / llama3_frequencies(plain, scaling)
    tensors = load_file(folder / "model.safetensors") | {FACTORS: divisors}
    fields = _fields(case.kind, folder, **{"rope.freq_base": 5e5})
    runner = TorchModelRunner.load(_import(tmp_path, case.kind, fields, tensors), "float32", 4)
    assert runner.config.rope_scaling == scaling


def test_other_frequency_divisors_are_refused(original: tuple[Case, Path], tmp_path: Path) -> None:
    case, folder = original
    tensors = load_file(folder / "model.safetensors") | {FACTORS: torch.full((8,), 8.0)}
    with pytest.raises(BadModel, match="rope_freqs"):
        _import(tmp_path, case.kind, _fields(case.kind, folder), tensors)
