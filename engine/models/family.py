"""What a family of models says about itself. No torch here: the config's reader needs it, and so do routers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Family:
    """Where a family leaves the common decoder (engine/models/decoder.py). A default is what Llama does.

    model_type: `model_type` in config.json.
    attention_bias: the query, key and value projections have biases.
    qk_norm: each query and key head goes through an RMSNorm of its own weights before it is rotated.
    config_defaults: what a field means that config.json leaves out, where transformers has a default of the family.
    """

    model_type: str
    attention_bias: bool = False
    qk_norm: bool = False
    config_defaults: Mapping[str, object] = field(default_factory=dict)
