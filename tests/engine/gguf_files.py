"""Writes small GGUFs as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import gguf
import torch

from engine.gguf_metadata import HUGGING_FACE_ARCHITECTURES
from engine.gguf_tensors import GLOBAL_TENSORS, block_tensors
from engine.models.families import FAMILIES
from engine.tokenizer import BYTE_OF_CHARACTER
from tests.engine.tiny_model import SPECIAL_TOKENS

TOKENS: Final = [*SPECIAL_TOKENS, *BYTE_OF_CHARACTER, "hi"]
F32: Final = gguf.GGMLQuantizationType.F32

CONFIG = {  # of a tiny model
    "vocab_size": len(TOKENS),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}


def tokenizer_fields(num_tokens: int = len(TOKENS), pre: str = "smollm") -> dict[str, object]:
    """Metadata of a tokenizer in which every byte is a token, filled up to `num_tokens` as the converter does."""
    padding = [f"[PAD{index}]" for index in range(len(TOKENS), num_tokens)]
    num_special = len(SPECIAL_TOKENS)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*TOKENS, *padding],
        "tokenizer.ggml.token_type": [3] * num_special + [1] * (len(TOKENS) - num_special) + [5] * len(padding),
        "tokenizer.ggml.merges": ["h i"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def model_fields(architecture: str, config: dict[str, Any]) -> dict[str, object]:
    """Metadata of a model with the sizes of a config.json."""
    sizes = {
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
    }
    if config.get("head_dim"):
        sizes |= dict.fromkeys(("attention.key_length", "attention.value_length"), config["head_dim"])
    return {f"{architecture}.{name}": value for name, value in sizes.items()}


def write_gguf(
    path: Path,
    architecture: str,
    fields: dict[str, object],
    tensors: dict[str, torch.Tensor],
    matrix_type: gguf.GGMLQuantizationType = F32,
) -> Path:
    """Write tensors with Hugging Face names, matrices in `matrix_type`, all others in float32; returns the path."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in fields.items():
        match value:
            case str():
                writer.add_string(name, value)
            case bool():
                writer.add_bool(name, value)
            case int():
                writer.add_uint32(name, value)
            case float():
                writer.add_float32(name, value)
            case list():
                writer.add_array(name, value)
    for name, tensor in tensors.items():
        kind = matrix_type if tensor.dim() == 2 else F32
        stored = gguf.quantize(_rows_as_stored(architecture, name, tensor, fields).contiguous().numpy(), kind)
        writer.add_tensor(gguf_name(architecture, name), stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(architecture: str, name: str) -> str:
    """The GGUF's name of a tensor; one that we do not know keeps its own."""
    family = FAMILIES[HUGGING_FACE_ARCHITECTURES.get(architecture, "LlamaForCausalLM")]
    names = {hugging_face: ours for ours, hugging_face in GLOBAL_TENSORS.items()}
    parts = {hugging_face: part for part, hugging_face in block_tensors(family).items()}
    if name.startswith("model.layers."):
        _, _, index, rest = name.split(".", 3)
        return f"blk.{index}.{parts[rest]}"
    return names.get(name, name)


def _rows_as_stored(architecture: str, name: str, tensor: torch.Tensor, fields: dict[str, object]) -> torch.Tensor:
    """Llama's q and k with each head's rows in pairs, for interleaved rotation; others as they are."""
    counts = {".q_proj.": "attention.head_count", ".k_proj.": "attention.head_count_kv"}
    field = next((field for part, field in counts.items() if part in name), None)
    if architecture != "llama" or field is None:
        return tensor
    num_heads = fields[f"llama.{field}"]
    assert isinstance(num_heads, int)
    return tensor.view(num_heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
