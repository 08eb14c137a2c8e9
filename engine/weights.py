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
EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"
QKV: Final = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
DTYPES: Final = ("F32", "F16", "BF16")  # as safetensors spells them


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Matrices are [out, in] in the model's dtype, norms [hidden_size] in float32.

    qkv: query, key and value heads stacked, [(num_heads + 2 * num_kv_heads) * head_dim, hidden_size].
    gate_up: gate over up, [2 * intermediate_size, hidden_size].
    qkv_bias: [rows of qkv], float32; None where the family has none.
    query_norm, key_norm: [head_dim], float32, one for all heads; None where the family has none.
    """

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    output: torch.Tensor
    feed_forward_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    qkv_bias: torch.Tensor | None = None
    query_norm: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None


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

    Raises: BadModel: a file or tensor is missing, a tensor is left over or has a wrong shape or dtype; all are named.
    """
    tensors = _TensorFiles(folder)
    tensors.check(_expected_shapes(config), _unread_shapes(config))
    embedding = tensors.read(EMBEDDING, dtype)
    layers = []
    for index in range(config.num_layers):
        layers.append(_load_layer(tensors, config, f"model.layers.{index}.", dtype))
        progress(f"layer {index + 1} of {config.num_layers}")
    return ModelWeights(
        embedding=embedding,
        layers=tuple(layers),
        final_norm=tensors.read("model.norm.weight", torch.float32),
        head=_load_head(tensors, config),
    )


def _load_head(tensors: _TensorFiles, config: ModelConfig) -> torch.Tensor:
    """Raises: BadModel: a tied head lies in the files all the same, and differs from the embedding."""
    if not config.tied_embeddings:
        return tensors.read(HEAD, torch.float32)
    embedding = tensors.read(EMBEDDING, torch.float32)
    if tensors.has(HEAD) and not torch.equal(tensors.read(HEAD, torch.float32), embedding):
        raise BadModel(f"tensor {HEAD} differs from {EMBEDDING}, but config.json says tie_word_embeddings")
    return embedding


def _load_layer(tensors: _TensorFiles, config: ModelConfig, prefix: str, dtype: torch.dtype) -> LayerWeights:
    def one(name: str, dtype: torch.dtype) -> torch.Tensor:
        return tensors.read(f"{prefix}{name}", dtype)

    def stacked(names: tuple[str, ...], kind: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.cat([one(f"{name}.{kind}", dtype) for name in names])

    return LayerWeights(
        attention_norm=one("input_layernorm.weight", torch.float32),
        qkv=stacked(QKV, "weight", dtype),
        output=one("self_attn.o_proj.weight", dtype),
        feed_forward_norm=one("post_attention_layernorm.weight", torch.float32),
        gate_up=stacked(("mlp.gate_proj", "mlp.up_proj"), "weight", dtype),
        down=one("mlp.down_proj.weight", dtype),
        qkv_bias=stacked(QKV, "bias", torch.float32) if config.attention_bias else None,
        query_norm=one("self_attn.q_norm.weight", torch.float32) if config.qk_norm else None,
        key_norm=one("self_attn.k_norm.weight", torch.float32) if config.qk_norm else None,
    )


def _expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that the files must hold, and no other."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
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
        if config.attention_bias:
            rows = (query_rows, kv_rows, kv_rows)
            shapes |= {f"{prefix}{name}.bias": (count,) for name, count in zip(QKV, rows, strict=True)}
        if config.qk_norm:
            shapes |= {f"{prefix}self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
    return shapes


def _unread_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Tensors that published files hold though they say nothing new: a tied head, rotary frequencies of old Llamas."""
    shapes: dict[str, tuple[int, ...]] = {
        f"model.layers.{index}.self_attn.rotary_emb.inv_freq": (config.head_dim // 2,)
        for index in range(config.num_layers)
    }
    if config.tied_embeddings:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
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

    def check(self, expected: Mapping[str, tuple[int, ...]], optional: Mapping[str, tuple[int, ...]]) -> None:
        """Raise BadModel unless all expected tensors and no unknown ones are there, with their shapes, as floats."""
        known = {**optional, **expected}
        problems = [
            f"missing tensor {name} {list(expected[name])}" for name in sorted(expected.keys() - self._file_of.keys())
        ]
        problems += [f"unexpected tensor {name}" for name in sorted(self._file_of.keys() - known.keys())]
        for name in sorted(known.keys() & self._file_of.keys()):
            found = self._file_of[name].get_slice(name)
            shape, dtype = tuple(found.get_shape()), found.get_dtype()
            if shape != known[name]:
                problems.append(f"tensor {name} has shape {list(shape)}, config.json asks for {list(known[name])}")
            if dtype not in DTYPES:
                problems.append(f"tensor {name} has dtype {dtype}, supported are {', '.join(DTYPES)}")
        if problems:
            raise BadModel(f"{self._folder}: {'; '.join(problems)}")

    def has(self, name: str) -> bool:
        """Whether the files hold it."""
        return name in self._file_of

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
