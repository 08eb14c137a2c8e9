"""What a LoRA adapter's adapter_config.json says, in PEFT's words. No torch here: `tandem up` reads it before anything
starts.

Everything that would change what the adapter computes, and that we do not compute, is refused by its key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from core.errors import BadModel
from engine.json_file import read_json_object

CONFIG_FILE: Final = "adapter_config.json"
TENSOR_FILE: Final = "adapter_model.safetensors"
MAX_RANK: Final = 512
MAX_ALPHA: Final = 1e9
TARGETS: Final = {  # short name to what stands before it in a tensor's name
    "q_proj": "self_attn",
    "k_proj": "self_attn",
    "v_proj": "self_attn",
    "o_proj": "self_attn",
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "down_proj": "mlp",
}

_READ: Final = {"r", "lora_alpha", "use_rslora", "target_modules"}
# How it was trained, or what it was trained on: the tensors say the same whatever stands there.
_SILENT: Final = {
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
}
_ONLY_SUPPORTED: Final[dict[str, tuple[object, ...]]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "init_lora_weights": (True, False, "gaussian", None),  # the others change the base's weights
}


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """scale: what the product of an adapter's matrices is multiplied by. targets: the projections that have some."""

    rank: int
    scale: float
    targets: tuple[str, ...]

    @staticmethod
    def load(folder: Path) -> AdapterConfig:
        """Parse adapter_config.json. Raises: BadModel: unreadable, or asks for what we do not compute; by its key."""
        path = folder / CONFIG_FILE
        fields = read_json_object(path)
        try:
            return _parse(fields)
        except BadModel as error:
            raise BadModel(f"{path}: {error}") from None


def _parse(fields: Mapping[str, Any]) -> AdapterConfig:
    for name, allowed in _ONLY_SUPPORTED.items():
        if fields.get(name, allowed[-1]) not in allowed:
            raise BadModel(f"{name}: only {allowed[0]!r} is supported, got {fields[name]!r}")
    for name in sorted(fields.keys() - _READ - _SILENT - _ONLY_SUPPORTED.keys()):
        if fields[name] not in (None, False, "", [], {}):
            raise BadModel(f"{name}: is not supported, got {fields[name]!r}")
    rank, alpha, rslora = fields.get("r"), fields.get("lora_alpha"), fields.get("use_rslora", False)
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= MAX_RANK:
        raise BadModel(f"r: must be a whole number in [1, {MAX_RANK}], got {rank!r}")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= MAX_ALPHA:
        raise BadModel(f"lora_alpha: must be a number of at most {MAX_ALPHA:g}, got {alpha!r}")
    if not isinstance(rslora, bool):
        raise BadModel(f"use_rslora: must be true or false, got {rslora!r}")
    # Source: LoRA, arXiv:2106.09685; rank-stabilised, arXiv:2312.03732.
    return AdapterConfig(rank, alpha / (math.sqrt(rank) if rslora else rank), _targets(fields.get("target_modules")))


def _targets(names: object) -> tuple[str, ...]:
    if not isinstance(names, list) or not names:
        raise BadModel(f"target_modules: must be a list of {', '.join(TARGETS)}, got {names!r}")
    for name in names:
        if not isinstance(name, str) or name not in TARGETS:
            raise BadModel(f"target_modules: only {', '.join(TARGETS)} are supported, got {name!r}")
    return tuple(name for name in TARGETS if name in names)
