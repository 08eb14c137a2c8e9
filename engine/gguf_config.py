"""The config.json that says what a GGUF's metadata says."""

from __future__ import annotations

from typing import Any, Final

import numpy
import torch

from core.errors import BadModel
from engine.gguf_metadata import Metadata
from engine.rope import llama3_frequencies, plain_frequencies
from engine.rope_scaling import Llama3Scaling

ROPE_FACTORS: Final = "rope_freqs.weight"
# Changes of rotary positions that no config.json of our families can ask for, and the value that changes nothing.
ROPE_EXTRAS: Final = {
    "rope.scale_linear": 1.0,
    "rope.scaling.alpha": 0.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
}


def hugging_face_config(metadata: Metadata) -> dict[str, Any]:
    """config.json as transformers writes it, without `tie_word_embeddings`.

    Raises: BadModel: a field is missing, or asks for what no config.json of the family can say.
    """
    hidden, num_heads = metadata.need_own("embedding_length", int), metadata.need_own("attention.head_count", int)
    if num_heads < 1:
        raise metadata.refuse("attention.head_count", f"must be positive, got {num_heads}")
    head_dim = metadata.get_own("attention.key_length", int, hidden // num_heads)
    rope_theta = _shortest_float(metadata.get_own("rope.freq_base", float, 10000.0))
    for field in ("rope.dimension_count", "attention.value_length"):
        if (found := metadata.get_own(field, int, head_dim)) != head_dim:
            raise metadata.refuse(field, f"must be the head's length, {head_dim}, got {found}")
    config = {
        "architectures": [metadata.hugging_face_architecture],
        "model_type": metadata.family.model_type,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "vocab_size": len(metadata.need("tokenizer.ggml.tokens", list)),
        "hidden_size": hidden,
        "intermediate_size": metadata.need_own("feed_forward_length", int),
        "num_hidden_layers": metadata.need_own("block_count", int),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.get_own("attention.head_count_kv", int, num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": _shortest_float(metadata.need_own("attention.layer_norm_rms_epsilon", float)),
        "rope_theta": rope_theta,
        "rope_scaling": _rope_scaling(metadata) or _llama3_scaling(metadata, rope_theta, head_dim),
        "max_position_embeddings": metadata.need_own("context_length", int),
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": _end_token_ids(metadata),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id", int),
        "torch_dtype": "float32",
    }
    window = metadata.get_own("attention.sliding_window", int)
    return config if window is None else config | {"sliding_window": window, "use_sliding_window": True}


def _end_token_ids(metadata: Metadata) -> int | list[int]:
    """The tokens that end a text, a turn or a message, the text's first; a list where they differ."""
    turns = [metadata.get(f"tokenizer.ggml.{name}_token_id", int) for name in ("eot", "eom")]
    ids = list(dict.fromkeys([metadata.need("tokenizer.ggml.eos_token_id", int), *filter(None, turns)]))
    return ids if len(ids) > 1 else ids[0]


def _rope_scaling(metadata: Metadata) -> dict[str, Any] | None:
    """`rope_scaling` of the metadata's own fields."""
    for field, neutral in ROPE_EXTRAS.items():
        if (found := metadata.get_own(field, float, neutral)) != neutral:
            raise metadata.refuse(field, f"only {neutral} is supported, got {found}")
    match metadata.get_own("rope.scaling.type", str, "none"):
        case "none":
            return None
        case "linear":
            return {"rope_type": "linear", "factor": _shortest_float(metadata.need_own("rope.scaling.factor", float))}
        case "yarn":
            ramp = {name: metadata.get_own(f"rope.scaling.yarn_{name}", float) for name in ("beta_fast", "beta_slow")}
            return {
                "rope_type": "yarn",
                "factor": _shortest_float(metadata.need_own("rope.scaling.factor", float)),
                "original_max_position_embeddings": metadata.need_own("rope.scaling.original_context_length", int),
            } | {name: _shortest_float(value) for name, value in ramp.items() if value is not None}
        case other:
            raise metadata.refuse("rope.scaling.type", f"only none, linear and yarn are supported, got {other!r}")


def _llama3_scaling(metadata: Metadata, theta: float, head_dim: int) -> dict[str, Any] | None:
    """Llama 3's scaling, of which a GGUF holds only what it divides each frequency by: recognised, or refused.

    All published Llama 3.1, 3.2 and 3.3 differ in nothing but `factor`, which is the largest divisor.
    """
    stored = next((tensor for tensor in metadata.reader.tensors if tensor.name == ROPE_FACTORS), None)
    if stored is None:
        return None
    refused = BadModel(f"{metadata.name}: tensor {ROPE_FACTORS}: not the scaling of a Llama 3")
    divisors = torch.from_numpy(numpy.array(stored.data, dtype=numpy.float32))
    if head_dim < 2 or divisors.shape != (head_dim // 2,):
        raise refused
    plain = plain_frequencies(theta, head_dim)
    scaling = Llama3Scaling(round(divisors.max().item(), 3), 1.0, 4.0, 8192)
    if not torch.allclose(plain / llama3_frequencies(plain, scaling), divisors, rtol=1e-3):
        raise refused
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_frequency_factor,
        "high_freq_factor": scaling.high_frequency_factor,
        "original_max_position_embeddings": scaling.original_context_tokens,
    }


def _shortest_float(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-5, not 9.999999747378752e-06."""
    return float(str(numpy.float32(value)))
