"""The sizes of a model, from a Hugging Face config.json. No torch here: routers read it too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from core.blocks import KvGeometry
from core.errors import BadModel
from engine.json_file import read_json_object
from engine.models.families import FAMILIES
from engine.models.family import Family
from engine.rope_scaling import RopeScaling, parse_rope

BLOCKS_CONFIG: Final = {"quant_method": "tandem_gguf_blocks"}  # matrices as blocks: engine/quantisation.py

# What we compute; any other value of these fields would give silently wrong tokens.
ONLY_SUPPORTED: Final[dict[str, tuple[object, ...]]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "quantization_config": (None, BLOCKS_CONFIG),
}
LAYER_TYPES: Final = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The sizes and constants of a decoder-only model, from config.json.

    attention_bias: the query, key and value projections have biases.
    qk_norm: each query and key head goes through an RMSNorm before it is rotated.
    """

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
    rope_scaling: RopeScaling | None
    attention_bias: bool
    qk_norm: bool

    @staticmethod
    def load(folder: Path) -> ModelConfig:
        """Parse config.json. Raises: BadModel: unreadable, a field is missing, or asks for what we do not compute."""
        fields = read_json_object(folder / "config.json")
        try:
            return ModelConfig.parse(fields)
        except BadModel as error:
            raise BadModel(f"{folder}/{error}") from None

    @staticmethod
    def parse(fields: Mapping[str, Any]) -> ModelConfig:
        """See `load`."""
        family = _family(fields)
        fields = {**family.config_defaults, **fields}
        _require_supported({"model_type": (family.model_type,)} | ONLY_SUPPORTED, fields)
        num_heads = _positive(fields, "num_attention_heads")
        max_context_tokens = _positive(fields, "max_position_embeddings")
        rope_theta, rope_scaling = parse_rope(fields, max_context_tokens)
        config = ModelConfig(
            vocab_size=_positive(fields, "vocab_size"),
            hidden_size=_positive(fields, "hidden_size"),
            intermediate_size=_positive(fields, "intermediate_size"),
            num_layers=_positive(fields, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=_positive(fields, "num_key_value_heads", default=num_heads),
            head_dim=_positive(fields, "head_dim", default=_positive(fields, "hidden_size") // num_heads),
            rms_norm_eps=_epsilon(fields, "rms_norm_eps"),
            rope_theta=rope_theta,
            max_context_tokens=max_context_tokens,
            tied_embeddings=bool(fields.get("tie_word_embeddings", False)),
            rope_scaling=rope_scaling,
            attention_bias=family.attention_bias,
            qk_norm=family.qk_norm,
        )
        if config.num_heads % config.num_kv_heads:
            raise BadModel(
                f"config.json: num_key_value_heads: {config.num_kv_heads} does not divide the {config.num_heads} heads"
            )
        if config.head_dim % 2:
            raise BadModel(f"config.json: head_dim: must be even for rotary positions, got {config.head_dim}")
        _require_full_attention(fields, config.max_context_tokens)
        return config

    def kv_geometry(self, block_size: int, dtype_bytes: int) -> KvGeometry:
        """The shape of a block of `block_size` tokens, `dtype_bytes` to a value."""
        return KvGeometry(block_size, self.num_layers, self.num_kv_heads, self.head_dim, dtype_bytes)


def _family(fields: Mapping[str, Any]) -> Family:
    names = fields.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in tuple(FAMILIES):
        raise BadModel(f"config.json: architectures: need one of {', '.join(FAMILIES)}, got {names}")
    return FAMILIES[names[0]]


def _require_supported(supported: Mapping[str, tuple[object, ...]], fields: Mapping[str, Any]) -> None:
    for name, allowed in supported.items():
        if fields.get(name, allowed[0]) not in allowed:
            raise BadModel(f"config.json: {name}: only {allowed[0]!r} is supported, got {fields[name]!r}")


def _require_full_attention(fields: Mapping[str, Any], max_context_tokens: int) -> None:
    """Raise BadModel where a layer would not see the whole context. A window as long as the context hides nothing."""
    layer_types = fields.get("layer_types") or []
    if not isinstance(layer_types, list) or not all(kind in LAYER_TYPES for kind in layer_types):
        raise BadModel(f"config.json: layer_types: only full_attention is supported, got {layer_types}")
    if fields.get("use_sliding_window") is False or fields.get("sliding_window") is None:
        return
    window = _positive(fields, "sliding_window")
    if window >= max_context_tokens:
        return
    raise BadModel(
        f"config.json: sliding_window: attention over the last {window} of {max_context_tokens} tokens is not supported"
    )


def _positive(fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = fields.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadModel(f"config.json: {name}: need a positive integer, got {value!r}")
    return value


def _epsilon(fields: Mapping[str, Any], name: str) -> float:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < 1.0:
        raise BadModel(f"config.json: {name}: need a number in [0, 1), got {value!r}")
    return float(value)
