"""What is wrong with a model folder is named, for every family; the same folder loads before it is spoilt."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from core.errors import BadModel
from engine.model_config import ModelConfig
from engine.weights import load_weights
from tests.engine.model_changes import Tensors, change_config, change_tensors
from tests.engine.random_models import CASES, KINDS, random_model, save
from tests.engine.tiny_model import write_json

LAYER = "model.layers.1."
BIAS = f"{LAYER}self_attn.k_proj.bias"
NORM = f"{LAYER}self_attn.q_norm.weight"
DOWN = f"{LAYER}mlp.down_proj.weight"
FREQUENCIES = f"{LAYER}self_attn.rotary_emb.inv_freq"


@pytest.fixture(scope="module", params=KINDS)
def original(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kind's first case, as transformers saves it; read only."""
    case = next(case for case in CASES if case.kind == request.param)
    return save(random_model(case), tmp_path_factory.mktemp("originals") / case.kind)


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    config = json.loads((original / "config.json").read_text())
    write_json(tmp_path / "config.json", config)
    (tmp_path / "model.safetensors").write_bytes((original / "model.safetensors").read_bytes())
    return tmp_path


def _kind(folder: Path) -> str:
    return str(json.loads((folder / "config.json").read_text())["model_type"])


def _load(folder: Path) -> None:
    load_weights(folder, ModelConfig.load(folder), torch.float32)


def _assert_refused(folder: Path, change: Callable[[Tensors], object], message: str) -> None:
    _load(folder)
    change_tensors(folder, change)
    with pytest.raises(BadModel) as caught:
        _load(folder)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(DOWN), f"missing tensor {DOWN} ["),
        (lambda tensors: tensors.update(extra=torch.ones(1)), "unexpected tensor extra"),
        (lambda tensors: tensors.update({DOWN: tensors[DOWN][:, 1:].contiguous()}), f"tensor {DOWN} has shape ["),
        (
            lambda tensors: tensors.update({DOWN: tensors[DOWN].to(torch.int8)}),
            f"tensor {DOWN} has dtype I8, supported are F32, F16, BF16",
        ),
        (lambda tensors: tensors.update({DOWN: tensors[DOWN].double()}), f"tensor {DOWN} has dtype F64"),
        (
            lambda tensors: tensors.update({DOWN: tensors[DOWN].to(torch.float8_e4m3fn)}),
            f"tensor {DOWN} has dtype F8_E4M3",
        ),
    ],
)
def test_wrong_tensors_are_named(folder: Path, change: Callable[[Tensors], object], message: str) -> None:
    _assert_refused(folder, change, message)


def test_tensors_of_the_family_alone(folder: Path) -> None:
    """Biases belong to Qwen2 and head norms to Qwen3: missing there, left over everywhere else."""
    for name, owner in ((BIAS, "qwen2"), (NORM, "qwen3")):
        _load(folder)
        kept = (folder / "model.safetensors").read_bytes()
        if _kind(folder) == owner:
            shape = list(load_file(folder / "model.safetensors")[name].shape)
            _assert_refused(folder, lambda tensors, name=name: tensors.pop(name), f"missing tensor {name} {shape}")
            (folder / "model.safetensors").write_bytes(kept)
            wrong = {name: torch.ones(3)}
            _assert_refused(folder, lambda tensors, wrong=wrong: tensors.update(wrong), f"{name} has shape [3]")
        else:
            extra = {name: torch.ones(16)}
            _assert_refused(folder, lambda tensors, extra=extra: tensors.update(extra), f"unexpected tensor {name}")
        (folder / "model.safetensors").write_bytes(kept)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_files_load(folder: Path, dtype: torch.dtype) -> None:
    change_tensors(folder, lambda tensors: tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()}))
    expected = load_file(folder / "model.safetensors")
    weights = load_weights(folder, ModelConfig.load(folder), torch.float32)
    assert torch.equal(weights.layers[1].down, expected[DOWN].float())
    assert weights.layers[1].attention_norm.dtype == torch.float32


def test_tensors_without_news_are_allowed(folder: Path) -> None:
    """Published files of tied models hold the head too (Qwen3-0.6B), old Llamas their rotary frequencies."""
    change_config(folder, tie_word_embeddings=True)
    change_tensors(
        folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    )
    change_tensors(
        folder, lambda tensors: tensors.update({FREQUENCIES: torch.ones(ModelConfig.load(folder).head_dim // 2)})
    )
    _assert_refused(
        folder,
        lambda tensors: tensors["lm_head.weight"].add_(1.0),
        "lm_head.weight differs from model.embed_tokens.weight",
    )


def test_progress_names_each_layer(folder: Path) -> None:
    lines: list[str] = []
    load_weights(folder, ModelConfig.load(folder), torch.bfloat16, lines.append)
    assert lines == [f"layer {index} of 3" for index in (1, 2, 3)]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "architectures"),
        ({"architectures": ["LlamaForCausalLM", "Qwen3ForCausalLM"]}, "architectures"),
        ({"model_type": "gpt2"}, "model_type"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"sliding_window": 256, "use_sliding_window": True}, "sliding_window"),
        ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "layer_types"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, r"rope_parameters\.rope_type"),
    ],
)
def test_configs_that_we_do_not_compute_name_the_field(folder: Path, changes: dict[str, object], field: str) -> None:
    ModelConfig.load(folder)
    change_config(folder, **changes)
    with pytest.raises(BadModel, match=rf"config\.json: {field}:"):
        ModelConfig.load(folder)


def test_a_window_that_hides_nothing_is_allowed(folder: Path) -> None:
    expected = ModelConfig.load(folder)
    change_config(folder, sliding_window=512, use_sliding_window=True)
    assert ModelConfig.load(folder) == expected
    change_config(folder, sliding_window=511, use_sliding_window=False)
    assert ModelConfig.load(folder) == expected
    change_config(folder, sliding_window=511, use_sliding_window=True)
    with pytest.raises(BadModel, match="attention over the last 511 of 512 tokens"):
        ModelConfig.load(folder)


def test_what_a_family_means_by_silence(folder: Path) -> None:
    """transformers' defaults of each family, where config.json leaves a field out."""
    fields = json.loads((folder / "config.json").read_text())
    silent = {name: value for name, value in fields.items() if name not in ("sliding_window", "use_sliding_window")}
    write_json(folder / "config.json", silent | {"max_position_embeddings": 32768})
    if _kind(folder) == "mistral":  # 4096 is its default
        with pytest.raises(BadModel, match="sliding_window"):
            ModelConfig.load(folder)
    else:
        assert ModelConfig.load(folder).max_context_tokens == 32768


def test_whatever_a_field_holds_is_taken_or_refused_by_its_name(original: Path) -> None:
    fields = json.loads((original / "config.json").read_text())
    odd = [None, True, 0, -1, 1.5, math.inf, math.nan, "x", [], [[]], [{}], {}, {"rope_type": []}, 10**400]
    names = [*fields, "layer_types", "sliding_window", "rope_scaling", "rope_parameters", "head_dim"]
    num_refused = 0
    for name, value in itertools.product(names, odd):
        try:
            ModelConfig.parse({**fields, name: value})
        except BadModel as error:
            num_refused += 1
            assert str(error).startswith("config.json: ")
    assert num_refused > len(names)
