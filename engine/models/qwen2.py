"""Qwen2 and Qwen2.5: biases on the query, key and value projections. Source: Qwen2, arXiv:2407.10671."""

from __future__ import annotations

from typing import Final

from engine.models.family import Family

QWEN2: Final = Family(
    model_type="qwen2",
    attention_bias=True,
    config_defaults={"num_key_value_heads": 32, "use_sliding_window": False},
)
