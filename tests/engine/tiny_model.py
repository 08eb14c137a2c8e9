"""A tiny random Llama in Hugging Face form, so that tests with real worker processes start in a second.

Same files as the default model, a byte-level tokenizer in which every byte is one token, and the same chat format.
Weights are drawn large enough that greedy output varies instead of repeating one token.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from engine.tokenizer import BYTE_OF_CHARACTER

SPECIAL_TOKENS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1 (BOS) and 2 (EOS)
SMALLEST_VOCAB: Final = len(SPECIAL_TOKENS) + len(BYTE_OF_CHARACTER)
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tiny_model(
    folder: Path,
    vocab_size: int = SMALLEST_VOCAB,
    num_layers: int = 2,
    hidden_size: int = 96,
    num_heads: int = 6,
    num_kv_heads: int = 2,
    max_context_tokens: int = 1024,
    seed: int = 0,
) -> Path:
    """Write config, weights (float32, tied embeddings) and tokenizer into `folder`, which is made; returns it.

    Equal arguments give equal bytes. Ids from SMALLEST_VOCAB on are tokens that no text encodes to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": max_context_tokens,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2})
    save_file(tiny_tensors(config, seed), folder / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(folder, vocab_size)
    return folder


def tiny_tensors(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Random tensors of every name and shape that the config asks for, float32."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv_rows = hidden // config["num_attention_heads"] * config["num_key_value_heads"]

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).mul_(2.0 / columns**0.5)

    tensors = {
        "model.embed_tokens.weight": matrix(config["vocab_size"], hidden),
        "model.norm.weight": torch.ones(hidden),
    }
    for index in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{index}."
        tensors |= {
            f"{prefix}input_layernorm.weight": torch.ones(hidden),
            f"{prefix}self_attn.q_proj.weight": matrix(hidden, hidden),
            f"{prefix}self_attn.k_proj.weight": matrix(kv_rows, hidden),
            f"{prefix}self_attn.v_proj.weight": matrix(kv_rows, hidden),
            f"{prefix}self_attn.o_proj.weight": matrix(hidden, hidden),
            f"{prefix}post_attention_layernorm.weight": torch.ones(hidden),
            f"{prefix}mlp.gate_proj.weight": matrix(inner, hidden),
            f"{prefix}mlp.up_proj.weight": matrix(inner, hidden),
            f"{prefix}mlp.down_proj.weight": matrix(hidden, inner),
        }
    return tensors


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON object."""
    path.write_text(json.dumps(content), encoding="utf-8")


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    tokens = [*SPECIAL_TOKENS, *BYTE_OF_CHARACTER]
    tokens += [f"<unused{index}>" for index in range(vocab_size - len(tokens))]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE},
    )
