from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from core.errors import BadModel, BadRequest, InvariantBroken
from core.request import SamplingParams
from engine.digest import tokenizer_digest, weights_digest
from engine.model_config import BLOCKS_CONFIG, ModelConfig
from engine.quantisation import QuantisedMatrix, metadata_key
from engine.step import SampleSpec, SequenceSlice, StepPlan
from engine.torch_runner import TorchModelRunner
from engine.weights import load_stored_weights, load_weights
from tests.engine.blocks import KINDS, random_blocks
from tests.engine.model_changes import Tensors, change_config, change_tensors
from tests.engine.tiny_model import write_json, write_tiny_model

Load = Callable[[Path, ModelConfig, torch.dtype], Any]
QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model")


def _load(folder: Path, dtype: torch.dtype = torch.float32) -> None:
    load_weights(folder, ModelConfig.load(folder), dtype)


def test_packed_weights_are_the_files(folder: Path) -> None:
    weights = load_weights(folder, ModelConfig.load(folder), torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    assert torch.equal(weights.layers[1].qkv[:96], tensors[QUERY].bfloat16())
    assert torch.equal(weights.layers[0].gate_up[192:], tensors["model.layers.0.mlp.up_proj.weight"].bfloat16())
    assert torch.equal(weights.head, tensors["model.embed_tokens.weight"])
    assert weights.final_norm.dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(QUERY), f"missing tensor {QUERY} [96, 96]"),
        (lambda tensors: tensors.update(extra=torch.ones(1)), "unexpected tensor extra"),
        (
            lambda tensors: tensors.update({QUERY: torch.ones(95, 96)}),
            f"tensor {QUERY} has shape [95, 96], config.json asks for [96, 96]",
        ),
    ],
)
def test_wrong_tensors_are_named(folder: Path, change: Callable[[Tensors], object], message: str) -> None:
    _load(folder)
    change_tensors(folder, change)
    with pytest.raises(BadModel) as caught:
        _load(folder)
    assert message in str(caught.value)


def test_every_wrong_tensor_is_named(folder: Path) -> None:
    change_tensors(folder, lambda tensors: (tensors.pop(QUERY), tensors.update(extra=torch.ones(1))))
    with pytest.raises(BadModel, match=r"missing tensor .*unexpected tensor extra"):
        _load(folder)


def test_untied_head(folder: Path) -> None:
    change_config(folder, tie_word_embeddings=False)
    with pytest.raises(BadModel, match=r"missing tensor lm_head\.weight"):
        _load(folder)
    head = torch.randn(259, 96)
    change_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": head}))
    assert torch.equal(load_weights(folder, ModelConfig.load(folder), torch.float32).head, head)


def test_sharded_files_give_the_same_logits(folder: Path, tmp_path: Path) -> None:
    sharded = write_tiny_model(tmp_path / "sharded")
    tensors = load_file(sharded / "model.safetensors")
    (sharded / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"model-1.safetensors": names[:7], "model-2.safetensors": names[7:]}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, sharded / file)
    weight_map = {name: file for file, held in shards.items() for name in held}
    write_json(sharded / "model.safetensors.index.json", {"weight_map": weight_map})
    plan = StepPlan((SequenceSlice("a", (5, 6, 7), 0, (0,), (SampleSpec(SamplingParams(), 0),)),))
    single, split = (TorchModelRunner.load(path, "float32", 4).logits(plan) for path in (folder, sharded))
    assert torch.equal(single, split)
    (sharded / "model-2.safetensors").unlink()
    with pytest.raises(BadModel, match=r"model-2\.safetensors"):
        _load(sharded)


@pytest.mark.parametrize(
    "file", ["../other/model.safetensors", "/other/model.safetensors", "..", "config.json", 1, [1]]
)
def test_an_index_that_names_other_folders_files_is_refused(folder: Path, file: object) -> None:
    """The digest is of the folder's safetensors files (engine/digest.py)."""
    write_json(folder / "model.safetensors.index.json", {"weight_map": {"a": file}})
    with pytest.raises(BadModel, match="weight_map: must name safetensors files beside it"):
        _load(folder)


@pytest.mark.parametrize("content", [b"", b"not safetensors at all"])
def test_damaged_files_are_named(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(BadModel, match=r"model\.safetensors: cannot be read"):
        _load(folder)


def test_truncated_files_are_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    for size in (4, 1000, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(BadModel, match=r"model\.safetensors: cannot be read"):
            _load(folder)
    path.write_bytes(content)
    _load(folder)


@pytest.mark.parametrize("load", [load_weights, load_stored_weights])
@pytest.mark.parametrize("name", [QUERY, "model.norm.weight", "model.embed_tokens.weight"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(folder: Path, load: Load, name: str, bad: float) -> None:
    config = ModelConfig.load(folder)
    load(folder, config, torch.bfloat16)
    change_tensors(folder, lambda tensors: tensors[name].view(-1)[-1].fill_(bad))
    with pytest.raises(BadModel, match=f"tensor {name} holds NaN or infinity"):
        load(folder, config, torch.bfloat16)


@pytest.fixture(params=KINDS)
def block_folder(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """The tiny model with all matrices as blocks of a kind."""
    folder = write_tiny_model(tmp_path / "blocks")
    tensors = load_file(folder / "model.safetensors")
    matrices = {
        name: random_blocks(request.param, *tensor.shape) for name, tensor in tensors.items() if tensor.dim() == 2
    }
    metadata = {metadata_key(name): request.param for name in matrices}
    rows = {name: matrix.blocks.flatten(1).contiguous() for name, matrix in matrices.items()}
    save_file(tensors | rows, folder / "model.safetensors", metadata=metadata)
    change_config(folder, quantization_config=BLOCKS_CONFIG)
    return request.param, folder


def _rewrite_blocks(folder: Path, change: Callable[[Tensors, dict[str, str]], object]) -> None:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        metadata = dict(file.metadata())
    tensors = load_file(folder / "model.safetensors")
    change(tensors, metadata)
    save_file(tensors, folder / "model.safetensors", metadata=metadata)


def test_blocks_stay_blocks_or_become_floats(block_folder: tuple[str, Path]) -> None:
    kind, folder = block_folder
    stored = load_stored_weights(folder, ModelConfig.load(folder), torch.bfloat16)
    floats = load_weights(folder, ModelConfig.load(folder), torch.bfloat16)
    assert stored.head is stored.embedding
    for found, expected in zip(stored.layers, floats.layers, strict=True):
        for name in ("qkv", "output", "gate_up", "down"):
            matrix = getattr(found, name)
            assert isinstance(matrix, QuantisedMatrix) and matrix.kind == kind
            assert torch.equal(matrix.dequantised().bfloat16(), getattr(expected, name))


def test_another_kind_in_a_stack_makes_it_floats(block_folder: tuple[str, Path]) -> None:
    kind, folder = block_folder

    def use_floats(tensors: Tensors, metadata: dict[str, str]) -> None:
        tensors[QUERY] = QuantisedMatrix.of_rows(kind, tensors[QUERY]).dequantised().half()
        del metadata[metadata_key(QUERY)]

    _rewrite_blocks(folder, use_floats)
    first, second = load_stored_weights(folder, ModelConfig.load(folder), torch.float32).layers
    assert isinstance(first.qkv, QuantisedMatrix)
    assert isinstance(second.qkv, torch.Tensor)
    assert torch.equal(second.qkv[:96], load_file(folder / "model.safetensors")[QUERY].float())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors, metadata: metadata.update({metadata_key(QUERY): "Q4_K"}),
            f"tensor {QUERY} has blocks of kind Q4_K, supported are Q4_0, Q4_1, Q8_0",
        ),
        (
            lambda tensors, metadata: metadata.pop(metadata_key(QUERY)),
            f"tensor {QUERY} has dtype U8, supported are F32",
        ),
        (
            lambda tensors, metadata: tensors.update({QUERY: tensors[QUERY][:, :-1].contiguous()}),
            f"tensor {QUERY} has shape [96, ",
        ),
        (
            lambda tensors, metadata: tensors.update({QUERY: tensors[QUERY][:-1].contiguous()}),
            f"tensor {QUERY} has shape [95, ",
        ),
        (
            lambda tensors, metadata: tensors.update({QUERY: tensors[QUERY].float()}),
            f"tensor {QUERY} has dtype F32, blocks of ",
        ),
        (
            lambda tensors, metadata: metadata.update({metadata_key("model.norm.weight"): "Q8_0"}),
            "tensor model.norm.weight has dtype F32, blocks of Q8_0 need U8",
        ),
        (
            lambda tensors, metadata: tensors[QUERY][5, :2].copy_(torch.tensor([0, 0x7E])),
            f"tensor {QUERY} holds NaN or infinity",
        ),
    ],
)
@pytest.mark.parametrize("load", [load_weights, load_stored_weights])
def test_wrong_blocks_are_named(
    block_folder: tuple[str, Path], load: Load, change: Callable[[Tensors, dict[str, str]], object], message: str
) -> None:
    _, folder = block_folder
    load(folder, ModelConfig.load(folder), torch.float32)
    _rewrite_blocks(folder, change)
    with pytest.raises(BadModel) as caught:
        load(folder, ModelConfig.load(folder), torch.float32)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("architectures", ["MixtralForCausalLM"]),
        ("model_type", "mistral"),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 10000.0}),
        ("quantization_config", {"bits": 4}),
        ("quantization_config", {"quant_method": "gptq"}),
        ("num_key_value_heads", 4),
        ("head_dim", 15),
        ("hidden_size", None),
        ("num_hidden_layers", "two"),
    ],
)
def test_unsupported_configs_name_the_field(folder: Path, field: str, value: object) -> None:
    ModelConfig.load(folder)
    change_config(folder, **{field: value})
    with pytest.raises(BadModel, match=rf"config\.json: {field}"):
        ModelConfig.load(folder)


def test_rope_theta_of_either_transformers_version(folder: Path) -> None:
    assert ModelConfig.load(folder).rope_theta == 10000.0
    change_config(folder, rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert ModelConfig.load(folder).rope_theta == 5e5


def test_missing_config(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match=r"config\.json: cannot be read"):
        ModelConfig.load(tmp_path)


def test_digests_follow_content(folder: Path, tmp_path: Path) -> None:
    twin = write_tiny_model(tmp_path / "twin")
    other = write_tiny_model(tmp_path / "other", seed=1)
    assert weights_digest(folder) == weights_digest(twin) != weights_digest(other)
    assert tokenizer_digest(folder) == tokenizer_digest(twin) == tokenizer_digest(other)
    before = weights_digest(folder)
    change_tensors(folder, lambda tensors: tensors[QUERY].add_(1.0))
    changed = weights_digest(folder)
    assert changed != before
    change_config(folder, rope_theta=20000.0)
    assert weights_digest(folder) != changed


def test_digest_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match="no safetensors"):
        weights_digest(tmp_path)


GREEDY = (SampleSpec(SamplingParams(temperature=0.0), 0),)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (SequenceSlice("r", (5,) * 17, 0, (1,), GREEDY), "do not cover 17 tokens"),
        (SequenceSlice("r", (5,), 0, (8,), GREEDY), "outside the pool of 8"),
        (SequenceSlice("r", (5,), 0, (-1,), GREEDY), "outside the pool of 8"),
        (SequenceSlice("r", (), 0, (1,), GREEDY), "empty slice"),
        (SequenceSlice("r", (259,), 0, (1,), GREEDY), "outside the vocabulary"),
        (SequenceSlice("r", (5,), 64, (1, 2, 3, 4, 5), GREEDY), "exceed the model's context"),
    ],
)
def test_broken_plans_are_bugs(tmp_path: Path, item: SequenceSlice, message: str) -> None:
    runner = TorchModelRunner.load(write_tiny_model(tmp_path / "model", max_context_tokens=64), "float32", 8)
    assert runner.run(StepPlan((SequenceSlice("r", (5, 6), 0, (1,)),))) == [()]
    with pytest.raises(InvariantBroken, match=message):
        runner.run(StepPlan((item,)))


@pytest.mark.parametrize(("dtype", "block_size", "field"), [("float16", 16, "dtype"), ("float32", 24, "block_size")])
def test_unsupported_settings(folder: Path, dtype: str, block_size: int, field: str) -> None:
    TorchModelRunner.load(folder, "float32", 8, block_size=32)
    with pytest.raises(BadRequest, match=field):
        TorchModelRunner.load(folder, dtype, 8, block_size)
