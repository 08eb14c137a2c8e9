"""Frequencies and attention factors, equal to transformers' to the last bit; configs in either spelling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from core.errors import BadModel
from engine.model_config import ModelConfig
from engine.rope import attention_factor, inverse_frequencies, rotary_tables

SIZES: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "head_dim": 64,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "linear", "factor": 3},
    LLAMA3 | {"original_max_position_embeddings": 64},
    LLAMA3 | {"original_max_position_embeddings": 8192},
    LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 100},
    LLAMA3,
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "attention_factor": 0.75},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 0.5},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "mscale": 1.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "truncate": False},
    {"rope_type": "yarn", "factor": 1.0},
]


def _config(theta: float = 10000.0, **fields: Any) -> ModelConfig:
    return ModelConfig.parse(SIZES | {"rope_theta": theta} | fields)


def _reference(scaling: dict[str, Any], theta: float) -> tuple[torch.Tensor, float]:
    config = LlamaConfig(**(SIZES | {"rope_parameters": scaling | {"rope_theta": theta}}))
    frequencies, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config)
    return frequencies, factor


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_scaled_frequencies_are_transformers(scaling: dict[str, Any], theta: float) -> None:
    expected, factor = _reference(scaling, theta)
    config = _config(theta, rope_scaling=scaling)
    assert torch.equal(inverse_frequencies(config), expected)
    assert attention_factor(config) == factor
    assert not torch.equal(expected, inverse_frequencies(_config(theta))) or scaling["factor"] == 1.0


@pytest.mark.parametrize("scaling", [None, *SCALINGS])
def test_tables_are_transformers(scaling: dict[str, Any] | None) -> None:
    embedding = LlamaRotaryEmbedding(
        LlamaConfig(**(SIZES | {"rope_parameters": (scaling or {"rope_type": "default"}) | {"rope_theta": 10000.0}}))
    )
    cosine, sine = embedding(torch.zeros(1), torch.arange(512).unsqueeze(0))
    ours = rotary_tables(_config(rope_scaling=scaling))
    assert torch.equal(ours[0], cosine[0, :, :32])
    assert torch.equal(ours[1], sine[0, :, :32])


@pytest.mark.parametrize("scaling", SCALINGS)
def test_every_spelling_means_the_same(scaling: dict[str, Any]) -> None:
    expected = _config(5e5, rope_scaling=scaling)
    older = {name: value for name, value in scaling.items() if name != "rope_type"} | {"type": scaling["rope_type"]}
    assert _config(5e5, rope_scaling=older) == expected
    assert _config(1.0, rope_parameters=scaling | {"rope_theta": 5e5}) == expected
    assert _config(5e5, rope_scaling=None, rope_parameters=scaling) == expected


def test_default_type_scales_nothing() -> None:
    plain = _config()
    assert plain.rope_scaling is None
    assert _config(rope_scaling={"rope_type": "default"}) == plain
    assert _config(rope_scaling={}) == plain


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, r"rope_scaling\.rope_type: only .* got 'dynamic'"),
        ({"type": "longrope", "factor": 2.0}, r"rope_scaling\.rope_type: only .* got 'longrope'"),
        ({"rope_type": "longrope", "short_factor": [1.0]}, r"rope_scaling\.short_factor: not supported"),
        ({"full_attention": {"rope_type": "default"}}, r"rope_scaling\.full_attention: not supported"),
        ({"rope_type": "linear"}, r"rope_scaling\.factor: need a number above 0, got None"),
        ({"rope_type": "yarn", "factor": 0}, r"rope_scaling\.factor: need a number above 0, got 0"),
        ({"rope_type": "yarn", "factor": "4"}, r"rope_scaling\.factor"),
        ({"rope_type": "llama3", "factor": 8.0}, r"rope_scaling\.low_freq_factor"),
        (LLAMA3 | {"low_freq_factor": 4.0}, r"rope_scaling\.low_freq_factor: must be below"),
        (LLAMA3 | {"partial_rotary_factor": 0.5}, r"rope_scaling\.partial_rotary_factor"),
        (["linear"], "rope_scaling: must be an object"),
    ],
)
def test_what_is_not_computed_is_refused(scaling: Any, message: str) -> None:
    _config(rope_scaling=LLAMA3)
    with pytest.raises(BadModel, match=rf"config\.json: {message}"):
        _config(rope_scaling=scaling)


def test_a_theta_of_zero_is_refused_and_none_is_the_usual_one() -> None:
    assert _config(None).rope_theta == 10000.0  # type: ignore[arg-type]
    with pytest.raises(BadModel, match="rope_theta: need a number above 0, got 0"):
        _config(0.0)


def test_transformers_writes_what_we_read() -> None:
    """Positive control of the spellings: the fields as the reference itself saves them."""
    sizes = SIZES | {"num_key_value_heads": 3}
    saved = Qwen3Config(**(sizes | {"rope_parameters": SCALINGS[6] | {"rope_theta": 1e6}})).to_dict()
    config = ModelConfig.parse(saved | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"})
    assert (config.rope_theta, config.rope_scaling) == (1e6, _config(1e6, rope_scaling=SCALINGS[6]).rope_scaling)
