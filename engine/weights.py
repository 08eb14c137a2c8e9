"""Reads a model folder in Hugging Face form: config.json and safetensors, one file or sharded."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from core.errors import BadModel

SUPPORTED_ARCHITECTURE: Final = "LlamaForCausalLM"
SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"

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
        return ModelConfig.parse(_read_json(folder / "config.json"))

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


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Matrices are [out, in] in the model's dtype, norms [hidden_size] in float32.

    qkv: query, key and value heads stacked, [(num_heads + 2 * num_kv_heads) * head_dim, hidden_size].
    gate_up: gate over up, [2 * intermediate_size, hidden_size].
    """

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    output: torch.Tensor
    feed_forward_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All weights. `head` is [vocab_size, hidden_size] in float32 whatever the dtype: bfloat16 logits would tie."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: torch.Tensor


def load_weights(
    folder: Path, config: ModelConfig, dtype: torch.dtype, progress: Callable[[str], None] = lambda _line: None
) -> ModelWeights:
    """Read, check and pack the weights; files are memory-mapped, so tensors of the wanted dtype cost no copy.

    Raises: BadModel: a file or tensor is missing, a tensor is left over or has the wrong shape; all are named.
    """
    tensors = _TensorFiles(folder)
    tensors.check(_expected_shapes(config))
    embedding = tensors.read("model.embed_tokens.weight", dtype)
    layers = []
    for index in range(config.num_layers):
        layers.append(_load_layer(tensors, f"model.layers.{index}.", dtype))
        progress(f"layer {index + 1} of {config.num_layers}")
    head_name = "model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight"
    return ModelWeights(
        embedding=embedding,
        layers=tuple(layers),
        final_norm=tensors.read("model.norm.weight", torch.float32),
        head=tensors.read(head_name, torch.float32),
    )


def _load_layer(tensors: _TensorFiles, prefix: str, dtype: torch.dtype) -> LayerWeights:
    def stacked(*names: str) -> torch.Tensor:
        return torch.cat([tensors.read(f"{prefix}{name}.weight", dtype) for name in names])

    return LayerWeights(
        attention_norm=tensors.read(f"{prefix}input_layernorm.weight", torch.float32),
        qkv=stacked("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        output=tensors.read(f"{prefix}self_attn.o_proj.weight", dtype),
        feed_forward_norm=tensors.read(f"{prefix}post_attention_layernorm.weight", torch.float32),
        gate_up=stacked("mlp.gate_proj", "mlp.up_proj"),
        down=tensors.read(f"{prefix}mlp.down_proj.weight", dtype),
    )


def _expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that the files must hold, and no other."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        shapes |= {
            f"{prefix}input_layernorm.weight": (hidden,),
            f"{prefix}self_attn.q_proj.weight": (query_rows, hidden),
            f"{prefix}self_attn.k_proj.weight": (kv_rows, hidden),
            f"{prefix}self_attn.v_proj.weight": (kv_rows, hidden),
            f"{prefix}self_attn.o_proj.weight": (hidden, query_rows),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
            f"{prefix}mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}mlp.up_proj.weight": (inner, hidden),
            f"{prefix}mlp.down_proj.weight": (hidden, inner),
        }
    return shapes


class _TensorFiles:
    """The safetensors files of a folder as one mapping from tensor name to tensor."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file_of: dict[str, Any] = {}
        for path in self._paths():
            try:
                opened: Any = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise BadModel(f"{path.name}: cannot be read as safetensors: {error}") from error
            self._file_of |= dict.fromkeys(opened.keys(), opened)

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Raise BadModel unless exactly the expected tensors are there, with their shapes."""
        problems = [
            f"missing tensor {name} {list(expected[name])}" for name in sorted(expected.keys() - self._file_of.keys())
        ]
        problems += [f"unexpected tensor {name}" for name in sorted(self._file_of.keys() - expected.keys())]
        for name in sorted(expected.keys() & self._file_of.keys()):
            shape = tuple(self._file_of[name].get_slice(name).get_shape())
            if shape != expected[name]:
                problems.append(f"tensor {name} has shape {list(shape)}, config.json asks for {list(expected[name])}")
        if problems:
            raise BadModel(f"{self._folder}: {'; '.join(problems)}")

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The tensor in `dtype`: a view of the mapped file where it already has it."""
        tensor: torch.Tensor = self._file_of[name].get_tensor(name)
        return tensor.to(dtype)

    def _paths(self) -> list[Path]:
        index = self._folder / INDEX_FILE
        if not index.exists():
            return [self._folder / SINGLE_FILE]
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise BadModel(f"{INDEX_FILE}: weight_map: missing")
        return [self._folder / name for name in sorted(set(weight_map.values()))]


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


def _read_json(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadModel(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise BadModel(f"{path}: must hold a JSON object")
    return loaded
