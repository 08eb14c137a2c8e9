"""Reads a model's weights from safetensors, one file or sharded, in Hugging Face form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from core.errors import BadModel
from engine.json_file import read_json_object
from engine.model_config import ModelConfig

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"


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
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise BadModel(f"{INDEX_FILE}: weight_map: missing")
        return [self._folder / name for name in sorted(set(weight_map.values()))]
