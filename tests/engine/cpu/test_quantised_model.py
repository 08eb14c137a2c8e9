"""Blocks are a choice of memory and speed: whole models give the logits of their dequantised weights, to the bit, or
their numeric class says that blocks are not rounded to the model's dtype."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from engine.cpu.build import build_library
from engine.cpu.library import KernelLibrary
from engine.cpu.packing import pack_weights
from engine.cpu.runner import CpuModelRunner
from engine.gguf_import import import_gguf
from engine.load_runner import load_runner
from engine.model_config import ModelConfig
from engine.quantisation import QuantisedMatrix
from engine.weights import StoredWeights, load_stored_weights, load_weights
from tests.engine.blocks import KINDS, gguf_type, round_for_blocks
from tests.engine.cpu.kernels import TARGETS
from tests.engine.gguf_files import TOKENS, model_fields, tokenizer_fields, write_gguf
from tests.engine.invariance import assert_batches_agree, assert_chunks_agree, forced_prompts
from tests.engine.random_adapters import write_adapter
from tests.engine.tiny_model import tiny_tensors
from tests.engine.token_stream import pooled_sequences, prefill

DTYPES = ("float32", "bfloat16")
CONFIG = {
    "vocab_size": len(TOKENS),
    "hidden_size": 96,
    "intermediate_size": 224,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}


def _import(path: Path, kind: str, tensors: dict[str, torch.Tensor]) -> Path:
    """A model folder that came from a GGUF of blocks."""
    fields = model_fields("llama", CONFIG) | tokenizer_fields()
    source = write_gguf(path / "model.gguf", "llama", fields, tensors, gguf_type(kind))
    return import_gguf(source, path / "model", lambda _line: None)


@pytest.fixture(scope="module", params=[(kind, tied) for kind in KINDS for tied in (True, False)], ids=str)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model; its head is tied or its own."""
    kind, tied = request.param
    tensors = tiny_tensors(CONFIG, seed=3)
    if not tied:
        tensors["lm_head.weight"] = tiny_tensors(CONFIG, seed=4)["model.embed_tokens.weight"]
    return _import(tmp_path_factory.mktemp("quantised"), kind, tensors)


@pytest.fixture(scope="module", params=KINDS)
def exact_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model whose blocks bfloat16 holds exactly."""
    tensors = {
        name: tensor if tensor.dim() == 1 else round_for_blocks(tensor, request.param)
        for name, tensor in tiny_tensors(CONFIG, seed=3).items()
    }
    return _import(tmp_path_factory.mktemp("exact"), request.param, tensors)


def _logits(runner: CpuModelRunner, adapter: str = "") -> list[torch.Tensor]:
    prompts = forced_prompts(runner.vocab_size, (1, 5, 40, 130))
    sequences = pooled_sequences(runner, prompts, 0, random.Random(0), (adapter,))
    return [prefill(runner, sequence, 128).clone() for sequence in sequences]


def _runners(folder: Path, dtype: str, library: KernelLibrary) -> list[CpuModelRunner]:
    """With blocks, and with the dequantised weights."""
    config, num_blocks = ModelConfig.load(folder), 64
    stored = load_stored_weights(folder, config, getattr(torch, dtype))
    assert isinstance(stored.embedding, QuantisedMatrix)
    assert all(isinstance(layer.qkv, QuantisedMatrix) for layer in stored.layers)
    floats = load_weights(folder, config, getattr(torch, dtype))
    return [CpuModelRunner(config, weights, dtype, num_blocks, 16, library) for weights in (stored, floats)]


def _assert_same(blocks: CpuModelRunner, floats: CpuModelRunner) -> None:
    for found, expected in zip(_logits(blocks), _logits(floats), strict=True):
        assert torch.equal(found, expected)
        assert found.std() > 0.1
    assert torch.equal(blocks.kv_pool, floats.kv_pool)


def _error(runner: CpuModelRunner, exact: CpuModelRunner) -> float:
    """Root mean square, of all logits."""
    pairs = zip(_logits(runner), _logits(exact), strict=True)
    return torch.cat([found - expected for found, expected in pairs]).square().mean().sqrt().item()


def _assert_as_their_classes_say(folder: Path, dtype: str, library: KernelLibrary, most_error: float = 0.9) -> None:
    """The same where the class is; else nearer to what float32 gives: `most_error` of the floats' error."""
    blocks, floats = _runners(folder, dtype, library)
    is_rounded = dtype == "float32" or library.instruction_set.endswith("bf16")
    assert blocks.numeric_class == floats.numeric_class + ("" if is_rounded else "-blocks")
    if is_rounded:
        _assert_same(blocks, floats)
    else:
        exact = _runners(folder, "float32", library)[0]
        assert 0.0 < _error(blocks, exact) < most_error * _error(floats, exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS.keys())
def test_logits_and_kv_are_those_of_floats(folder: Path, dtype: str, target: tuple[str, ...]) -> None:
    _assert_as_their_classes_say(folder, dtype, KernelLibrary(build_library(target_flags=target)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS.keys())
def test_what_needs_no_rounding_is_the_same(exact_folder: Path, dtype: str, target: tuple[str, ...]) -> None:
    _assert_same(*_runners(exact_folder, dtype, KernelLibrary(build_library(target_flags=target))))


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_and_batches_do_not_change_a_bit(folder: Path, dtype: str) -> None:
    runner = CpuModelRunner.load(folder, dtype, num_blocks=256)
    assert_chunks_agree(runner, (3, 120), (1, 37))
    assert_batches_agree(runner, (1, 2, 3, 15, 16, 31, 64, 97))


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_adapter_adds_to_blocks_what_it_adds_to_floats(exact_folder: Path, dtype: str, tmp_path: Path) -> None:
    adapters = {"a": write_adapter(tmp_path, exact_folder)}
    packed, unpacked = (
        CpuModelRunner.load(exact_folder, dtype, num_blocks=64, unpack=unpack, adapters=adapters)
        for unpack in (False, True)
    )
    adapted = _logits(packed, "a")
    assert all(torch.equal(*pair) for pair in zip(adapted, _logits(unpacked, "a"), strict=True))
    assert not any(torch.equal(*pair) for pair in zip(adapted, _logits(packed), strict=True))


def test_default_model_in_bfloat16(model_folder: Path) -> None:
    """In float32 its golden tokens say it. Its activations' rounding outweighs that of weights."""
    _assert_as_their_classes_say(model_folder, "bfloat16", KernelLibrary(build_library()), most_error=1.05)


def test_blocks_are_unpacked_on_request_and_only_then(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = []

    def pack(weights: StoredWeights, *arguments: object) -> object:
        held.append(isinstance(weights.layers[0].qkv, QuantisedMatrix))
        return pack_weights(weights, *arguments)

    monkeypatch.setattr("engine.cpu.runner.pack_weights", pack)
    packed, unpacked = (load_runner(folder, "float32", 64, 16, unpack=unpack) for unpack in (False, True))
    assert held == [True, False]
    assert all(torch.equal(*pair) for pair in zip(_logits(packed), _logits(unpacked), strict=True))
