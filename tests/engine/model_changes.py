"""What tests change in a model's folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.engine.tiny_model import write_json

Tensors = dict[str, torch.Tensor]


def change_tensors(folder: Path, change: Callable[[Tensors], object]) -> None:
    """Of the one file; `change` works in place."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def change_config(folder: Path, **changes: object) -> None:
    write_json(folder / "config.json", json.loads((folder / "config.json").read_text()) | changes)
