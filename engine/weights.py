"""Reads a model's weights from safetensors, one file or sharded, in Hugging Face form.

Matrices may lie there as floats or as quantised blocks (engine/quantisation.py). `load_weights` makes floats of all;
`load_stored_weights` leaves blocks as they are. Where ranks share a model (engine/parallel/shard.py), `load_weights`
keeps one rank's rows of every matrix, and the whole embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeVar, cast

import torch

from engine.model_config import ModelConfig
from engine.parallel.shard import WHOLE, Shard
from engine.quantisation import Matrix, stack
from engine.tensor_files import TensorFiles

EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"
QKV: Final = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")

M = TypeVar("M", bound=Matrix)
Rows = TypeVar("Rows", bound=Matrix)


@dataclass(frozen=True, slots=True)
class Layer(Generic[M]):
    """One decoder layer. Matrices are [out, in] in the model's dtype or blocks, norms [hidden_size] in float32.

    qkv: query, key and value heads stacked, [(num_heads + 2 * num_kv_heads) * head_dim, hidden_size].
    gate_up: gate over up, [2 * intermediate_size, hidden_size].
    qkv_bias: [rows of qkv], float32; None where the family has none.
    query_norm, key_norm: [head_dim], float32, one for all heads; None where the family has none.
    """

    attention_norm: torch.Tensor
    qkv: M
    output: M
    feed_forward_norm: torch.Tensor
    gate_up: M
    down: M
    qkv_bias: torch.Tensor | None = None
    query_norm: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Weights(Generic[M]):
    """All weights. A `head` of floats is float32 whatever the dtype: bfloat16 logits would tie.

    embedding, head: [vocab_size, hidden_size]; one object where they are tied, and both float32 or blocks.
    """

    embedding: M
    layers: tuple[Layer[M], ...]
    final_norm: torch.Tensor
    head: M


LayerWeights = Layer[torch.Tensor]
ModelWeights = Weights[torch.Tensor]
StoredWeights = Weights[Matrix]


def load_weights(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    progress: Callable[[str], None] = lambda _line: None,
    shard: Shard = WHOLE,
) -> ModelWeights:
    """Read, check and stack the weights as floats; files are mapped, so that tensors of the wanted dtype cost no copy.

    config: the whole model's.
    Raises: BadModel: a file or tensor is missing, a tensor is left over, has a wrong shape, dtype or kind, or holds NaN
        or infinity; all wrong forms are named at once.
    """
    tensors = TensorFiles(folder)
    return _Reader[torch.Tensor](tensors, config, dtype, tensors.read, torch.cat, shard).read_all(progress)


def load_stored_weights(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    progress: Callable[[str], None] = lambda _line: None,
    *,
    unpack: bool = False,
) -> StoredWeights:
    """As `load_weights`, but unless `unpack` blocks stay blocks where all matrices that are stacked are of one kind."""
    tensors = TensorFiles(folder)
    read: Callable[[str, torch.dtype], Matrix] = tensors.read if unpack else tensors.read_stored

    def stack_stored(parts: Sequence[Matrix]) -> Matrix:
        return stack(parts, dtype)

    return _Reader[Matrix](tensors, config, dtype, read, stack_stored).read_all(progress)


def read_tensors(folder: Path, config: ModelConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The model's tensors by their names in the files, as floats, none stacked.

    Raises: BadModel: see `load_weights`.
    """
    tensors = TensorFiles(folder)
    expected = expected_shapes(config)
    tensors.check(expected, _unread_shapes(config))
    return {name: tensors.read(name, dtype) for name in expected}


class _Reader(Generic[M]):
    """Puts the tensors of checked files together. read: a matrix by its name, in a dtype where it is of floats."""

    def __init__(
        self,
        tensors: TensorFiles,
        config: ModelConfig,
        dtype: torch.dtype,
        read: Callable[[str, torch.dtype], M],
        join: Callable[[list[M]], M],
        shard: Shard = WHOLE,
    ) -> None:
        tensors.check(expected_shapes(config), _unread_shapes(config))
        self._tensors = tensors
        self._config = config
        self._dtype = dtype
        self._read: Callable[[str, torch.dtype], M] = read
        self._join: Callable[[list[M]], M] = join
        self._shard = shard

    def read_all(self, progress: Callable[[str], None]) -> Weights[M]:
        embedding = self._read(EMBEDDING, self._dtype)
        layers = []
        for index in range(self._config.num_layers):
            layers.append(self._layer(f"model.layers.{index}."))
            progress(f"layer {index + 1} of {self._config.num_layers}")
        return Weights(embedding, tuple(layers), self._vector("model.norm.weight"), self._head(embedding))

    def _layer(self, prefix: str) -> Layer[M]:
        config = self._config
        biases = [self._rows(self._vector(f"{prefix}{name}.bias")) for name in QKV] if config.attention_bias else None
        return Layer(
            attention_norm=self._vector(f"{prefix}input_layernorm.weight"),
            qkv=self._stacked(f"{prefix}{name}.weight" for name in QKV),
            output=self._rows(self._read(f"{prefix}self_attn.o_proj.weight", self._dtype)),
            feed_forward_norm=self._vector(f"{prefix}post_attention_layernorm.weight"),
            gate_up=self._stacked(f"{prefix}mlp.{name}_proj.weight" for name in ("gate", "up")),
            down=self._rows(self._read(f"{prefix}mlp.down_proj.weight", self._dtype)),
            qkv_bias=torch.cat(biases) if biases else None,
            query_norm=self._vector(f"{prefix}self_attn.q_norm.weight") if config.qk_norm else None,
            key_norm=self._vector(f"{prefix}self_attn.k_norm.weight") if config.qk_norm else None,
        )

    def _stacked(self, names: Iterable[str]) -> M:
        return self._join([self._rows(self._read(name, self._dtype)) for name in names])

    def _rows(self, matrix: Rows) -> Rows:
        """The rank's."""
        if self._shard.size == 1:
            return matrix
        assert isinstance(matrix, torch.Tensor)  # who holds blocks computes alone
        return cast(Rows, matrix[self._shard.rows(len(matrix))])

    def _vector(self, name: str) -> torch.Tensor:
        return self._tensors.read(name, torch.float32)

    def _head(self, embedding: M) -> M:
        """Raises: BadModel: a tied head lies in the files all the same, and differs from the embedding."""
        if not self._config.tied_embeddings:
            return self._rows(self._read(HEAD, torch.float32))
        if self._tensors.has(HEAD):
            self._tensors.require_equal(HEAD, EMBEDDING)
        is_rounded = isinstance(embedding, torch.Tensor) and embedding.dtype != torch.float32
        return self._rows(self._read(EMBEDDING, torch.float32) if is_rounded else embedding)


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
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
