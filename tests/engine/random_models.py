"""Small random models of every family, made and computed by transformers: the reference that is not ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE: Final = 300
KINDS: Final[dict[str, tuple[type, type]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
LINEAR: Final = {"rope_type": "linear", "factor": 4.0}
YARN: Final = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
LLAMA3: Final = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@dataclass(frozen=True)
class Case:
    """One random model. `rope` adds to rope_parameters, `more` to the config; hidden size is num_heads * width.

    seed: of the weights, so that no two best logits of the tests' prompts lie so near that the order of sums decides.
    """

    name: str
    kind: str
    num_heads: int
    num_kv_heads: int
    width: int = 16
    seed: int = 0
    tied: bool = False
    rope: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)


CASES: Final = (
    Case("llama-6-2", "llama", 6, 2, tied=True),
    Case("llama-4-4-llama3", "llama", 4, 4, rope=LLAMA3),
    Case("llama-8-1-linear-head-48", "llama", 8, 1, seed=1, rope=LINEAR, more={"head_dim": 48}),
    Case("mistral-6-2", "mistral", 6, 2, seed=2, more={"sliding_window": None}),
    Case("mistral-4-4-head-32", "mistral", 4, 4, seed=2, tied=True, more={"sliding_window": 1024, "head_dim": 32}),
    Case("qwen2-6-2", "qwen2", 6, 2, tied=True),
    Case("qwen2-8-1-yarn", "qwen2", 8, 1, rope=YARN),
    Case("qwen2-4-4-linear", "qwen2", 4, 4, seed=1, rope=LINEAR),
    Case("qwen3-6-2-head-32", "qwen3", 6, 2, seed=2, tied=True, more={"head_dim": 32}),
    Case("qwen3-4-4-yarn-head-24", "qwen3", 4, 4, rope=YARN, more={"head_dim": 24}),
    Case("qwen3-8-1-llama3-head-64", "qwen3", 8, 1, seed=2, rope=LLAMA3, more={"head_dim": 64}),
)


def random_model(case: Case) -> PreTrainedModel:
    """The case's model in float32. Weights are large enough that outputs vary; biases and norms are random too."""
    config_class, model_class = KINDS[case.kind]
    config = config_class(
        vocab_size=VOCAB_SIZE,
        hidden_size=case.num_heads * case.width,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=case.num_heads,
        num_key_value_heads=case.num_kv_heads,
        max_position_embeddings=512,
        tie_word_embeddings=case.tied,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0} | case.rope,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **case.more,
    )
    model: PreTrainedModel = model_class(config).float().eval()
    generator = torch.Generator().manual_seed(case.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 2:
                parameter.copy_(drawn * 1.5 / parameter.shape[1] ** 0.5)
            else:
                parameter.copy_(drawn * 0.3 + (1.0 if name.endswith("norm.weight") else 0.0))
    return model


def save(model: PreTrainedModel, folder: Path, shard_size: str = "5GB") -> Path:
    """As transformers writes it; returns the folder."""
    model.save_pretrained(folder, max_shard_size=shard_size)
    return folder


def greedy_reference(model: PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens by transformers, the whole sequence computed anew each time, and the logits of each step,
    [num_tokens, vocab_size]."""
    token_ids, rows = list(prompt), []
    with torch.inference_mode():
        for _ in range(num_tokens):
            rows.append(model(torch.tensor([token_ids]), use_cache=False).logits[0, -1])
            token_ids.append(int(rows[-1].argmax()))
    return token_ids[len(prompt) :], torch.stack(rows)
