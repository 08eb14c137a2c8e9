"""Qwen3, dense: no biases; query and key heads are normalised before they are rotated. Source: arXiv:2505.09388."""

from __future__ import annotations

from typing import Final

from engine.models.family import Family

QWEN3: Final = Family(
    model_type="qwen3",
    qk_norm=True,
    config_defaults={"num_key_value_heads": 32, "head_dim": 128, "use_sliding_window": False},
)
