"""The sizes of a model, from a Hugging Face config.json. No torch here: routers read it too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from core.errors import BadModel
from engine.json_file import read_json_object

SUPPORTED_ARCHITECTURE: Final = "LlamaForCausalLM"

# What we compute; any other value of these fields would give silently wrong tokens.
ONLY_SUPPORTED: Final[dict[str, tuple[object, ...]]] = {
    "model_type": ("llama",),
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "rope_scaling": (None,),
    "quantization_config": (None,),
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The sizes and constants of a Llama-family model, from config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_context_tokens: int
    tied_embeddings: bool

    @staticmethod
    def load(folder: Path) -> ModelConfig:
        """Parse config.json. Raises: BadModel: unreadable, a field is missing, or asks for what we do not compute."""
        return ModelConfig.parse(read_json_object(folder / "config.json"))

    @staticmethod
    def parse(fields: Mapping[str, Any]) -> ModelConfig:
        """See `load`."""
        if fields.get("architectures") != [SUPPORTED_ARCHITECTURE]:
            raise BadModel(
                f"config.json: architectures: need [{SUPPORTED_ARCHITECTURE!r}], got {fields.get('architectures')}"
            )
        for name, allowed in ONLY_SUPPORTED.items():
            if fields.get(name, allowed[0]) not in allowed:
                raise BadModel(f"config.json: {name}: only {allowed[0]!r} is supported, got {fields[name]!r}")
        num_heads = _positive(fields, "num_attention_heads")
        config = ModelConfig(
            vocab_size=_positive(fields, "vocab_size"),
            hidden_size=_positive(fields, "hidden_size"),
            intermediate_size=_positive(fields, "intermediate_size"),
            num_layers=_positive(fields, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=_positive(fields, "num_key_value_heads", default=num_heads),
            head_dim=_positive(fields, "head_dim", default=_positive(fields, "hidden_size") // num_heads),
            rms_norm_eps=float(_field(fields, "rms_norm_eps")),
            rope_theta=_rope_theta(fields),
            max_context_tokens=_positive(fields, "max_position_embeddings"),
            tied_embeddings=bool(fields.get("tie_word_embeddings", False)),
        )
        if config.num_heads % config.num_kv_heads:
            raise BadModel(
                f"config.json: num_key_value_heads: {config.num_kv_heads} does not divide the {config.num_heads} heads"
            )
        if config.head_dim % 2:
            raise BadModel(f"config.json: head_dim: must be even for rotary positions, got {config.head_dim}")
        return config


def _rope_theta(fields: Mapping[str, Any]) -> float:
    """`rope_theta`, at the top level or in transformers 5's `rope_parameters`, whose only known type is default."""
    parameters = fields.get("rope_parameters")
    if parameters is None:
        return float(fields.get("rope_theta", 10000.0))
    if parameters.get("rope_type", "default") != "default":
        raise BadModel(
            f"config.json: rope_parameters.rope_type: only 'default' is supported, got {parameters['rope_type']!r}"
        )
    return float(_field(parameters, "rope_theta"))


def _positive(fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = fields.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or value < 1:
        raise BadModel(f"config.json: {name}: need a positive integer, got {value!r}")
    return value


def _field(fields: Mapping[str, Any], name: str) -> Any:
    if name not in fields:
        raise BadModel(f"config.json: {name}: missing")
    return fields[name]
