"""Random LoRA adapters in PEFT's form, and what merging them into a model's weights gives: the reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from engine.adapter_config import CONFIG_FILE, TARGETS, TENSOR_FILE
from engine.model_config import ModelConfig
from engine.weights import expected_shapes
from tests.engine.tiny_model import write_json

PREFIX = "base_model.model."


def write_adapter(
    folder: Path,
    model_folder: Path,
    targets: Sequence[str] = tuple(TARGETS),
    rank: int = 4,
    seed: int = 0,
    strength: float = 1.0,
    **more: Any,
) -> Path:
    """Write an adapter of the model into `folder`, which is made; returns it. `more` goes into its config.

    strength: how large what it adds is, beside what a random model's projection gives.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets), "bias": "none"}
    write_json(folder / CONFIG_FILE, config | {"task_type": "CAUSAL_LM", "lora_dropout": 0.05} | more)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (num_outputs, num_inputs) in _targeted(model_folder, targets).items():
        shrink = torch.randn(rank, num_inputs, generator=generator) / num_inputs**0.5
        expand = torch.randn(num_outputs, rank, generator=generator) / rank**0.5 * strength
        tensors[f"{PREFIX}{name}.lora_A.weight"] = shrink
        tensors[f"{PREFIX}{name}.lora_B.weight"] = expand
    save_file(tensors, folder / TENSOR_FILE, metadata={"format": "pt"})
    return folder


def some_adapters(folder: Path, model_folder: Path) -> dict[str, Path]:
    """By their names: two of all targets, of other ranks, and one of some."""
    return {
        "a": write_adapter(folder / "a", model_folder, rank=3, seed=1),
        "b": write_adapter(folder / "b", model_folder, rank=17, seed=2),
        "attention": write_adapter(folder / "attention", model_folder, ("q_proj", "v_proj"), rank=8, seed=3),
    }


def merge(model: torch.nn.Module, adapter: Path, scale: float) -> None:
    """Add scale * B A to the weights of a model of transformers."""
    tensors = load_file(adapter / TENSOR_FILE)
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name in [name for name in tensors if ".lora_A." in name]:
            weight = weights[name.removeprefix(PREFIX).replace(".lora_A", "")]
            weight += scale * tensors[name.replace("lora_A", "lora_B")] @ tensors[name]


def _targeted(model_folder: Path, targets: Sequence[str]) -> dict[str, tuple[int, ...]]:
    shapes = expected_shapes(ModelConfig.load(model_folder)).items()
    return {
        name.removesuffix(".weight"): shape
        for name, shape in shapes
        if name.removesuffix(".weight").rpartition(".")[2] in targets
    }
