"""Llama, and Mistral, which is Llama with other names and a sliding window (refused where it would matter).

Source: Llama, arXiv:2302.13971; Mistral, arXiv:2310.06825.
"""

from __future__ import annotations

from typing import Final

from engine.models.family import Family

LLAMA: Final = Family(model_type="llama")
MISTRAL: Final = Family(model_type="mistral", config_defaults={"num_key_value_heads": 8, "sliding_window": 4096})
