"""The families that we compute, by the name that config.json gives in `architectures`."""

from __future__ import annotations

from typing import Final

from engine.models.family import Family
from engine.models.llama import LLAMA, MISTRAL
from engine.models.qwen2 import QWEN2
from engine.models.qwen3 import QWEN3

FAMILIES: Final[dict[str, Family]] = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": MISTRAL,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen3ForCausalLM": QWEN3,
}
