"""A GGUF's tensors under their Hugging Face names, as a model folder keeps them."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any, Final

import gguf
import numpy
import torch

from core.errors import BadModel
from engine.gguf_config import ROPE_FACTORS
from engine.gguf_metadata import Metadata
from engine.model_config import ModelConfig
from engine.models.family import Family
from engine.quantisation import BLOCK_KINDS
from engine.weights import expected_shapes

BLOCK_TENSORS: Final = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
BIAS_TENSORS: Final = {
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
}
NORM_TENSORS: Final = {
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
}
GLOBAL_TENSORS: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
FLOATS: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
PAIRED_ROWS: Final = {"llama"}  # architectures whose q and k rows llama.cpp stores in pairs


def block_tensors(family: Family) -> dict[str, str]:
    """Hugging Face names, below a layer, by GGUF names, below a block."""
    biases = BIAS_TENSORS if family.attention_bias else {}
    norms = NORM_TENSORS if family.qk_norm else {}
    return BLOCK_TENSORS | biases | norms


def require_tensors(metadata: Metadata, config: ModelConfig) -> None:
    """Raises: BadModel: a tensor is missing, has no place in the family, or another shape than the metadata ask for."""
    found = {tensor.name: tensor for tensor in metadata.reader.tensors if tensor.name != ROPE_FACTORS}
    if config.num_layers > len(found):
        raise metadata.refuse("block_count", f"{config.num_layers} blocks, but the file has {len(found)} tensors")
    names = _names(metadata.family, config.num_layers)
    _require_all(metadata, names, found.keys())
    expected = expected_shapes(config)
    for name, tensor in found.items():
        shape, asked = tuple(int(size) for size in reversed(tensor.shape)), expected[names[name]]
        if shape != asked:
            raise BadModel(
                f"{metadata.name}: tensor {name} has shape {list(shape)}, the metadata ask for {list(asked)}"
            )


def stored_tensors(
    metadata: Metadata, config: dict[str, Any], progress: Callable[[str], None]
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """All tensors by their Hugging Face names, and the kinds of those that are blocks (engine/quantisation.py).

    They have passed `require_tensors`. Floats keep their dtype; other kinds of blocks than ours become float32.
    Raises: BadModel: a tensor is stored in a way that cannot be read.
    """
    num_layers = config["num_hidden_layers"]
    names = _names(metadata.family, num_layers)
    tensors, kinds = {}, {}
    for tensor in metadata.reader.tensors:
        if tensor.name == ROPE_FACTORS:  # said by config.json
            continue
        name = names[tensor.name]
        rows = _stored(metadata, tensor)
        if metadata.architecture in PAIRED_ROWS:
            rows = _half_split(name, rows, config)
        tensors[name] = rows.contiguous()
        if rows.dtype == torch.uint8:
            kinds[name] = tensor.tensor_type.name
        if name.endswith("down_proj.weight"):
            progress(f"read layer {int(name.split('.')[2]) + 1} of {num_layers}")
    return tensors, kinds


def _names(family: Family, num_layers: int) -> dict[str, str]:
    """Hugging Face names by GGUF names."""
    parts = block_tensors(family).items()
    blocks = {
        f"blk.{index}.{part}": f"model.layers.{index}.{name}" for index in range(num_layers) for part, name in parts
    }
    return GLOBAL_TENSORS | blocks


def _require_all(metadata: Metadata, names: dict[str, str], found: Set[str]) -> None:
    """Raise BadModel unless exactly these are there; only the head may be missing: it is then tied to the embedding."""
    if missing := names.keys() - found - {"output.weight"}:
        raise BadModel(f"{metadata.name}: missing tensors: {', '.join(sorted(missing))}")
    if extra := found - names.keys():
        family = metadata.architecture
        raise BadModel(f"{metadata.name}: tensors that have no place in a {family} model: {', '.join(sorted(extra))}")


def _stored(metadata: Metadata, tensor: gguf.ReaderTensor) -> torch.Tensor:
    """Rows as they lie in the file, bytes where they are blocks that we keep; else floats."""
    kind, shape = tensor.tensor_type.name, [int(size) for size in reversed(tensor.shape)]
    data = torch.from_numpy(numpy.array(tensor.data))  # a copy: the file is mapped read-only
    if kind in FLOATS:
        return data.view(FLOATS[kind]).view(shape)
    if kind in BLOCK_KINDS and len(shape) == 2:
        return data.view(torch.uint8)
    try:
        return torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type)).float()
    except (NotImplementedError, ValueError) as error:
        raise BadModel(f"{metadata.name}: tensor {tensor.name}: {kind} cannot be dequantised: {error}") from error


def _half_split(name: str, rows: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """`rows` of the tensor in Hugging Face's order: q and k with each head's rows in halves, others as they are."""
    if ".q_proj." in name:
        return _half_split_rows(rows, config["num_attention_heads"])
    if ".k_proj." in name:
        return _half_split_rows(rows, config["num_key_value_heads"])
    return rows


def _half_split_rows(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo llama.cpp's permutation, which stores each head's rows in pairs for interleaved rotation."""
    per_head = rows.view(num_heads, len(rows) // num_heads // 2, 2, *rows.shape[1:])
    return per_head.transpose(1, 2).reshape(rows.shape)
