"""Moves a model's weights to a device."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch

from engine.weights import ModelWeights


def to_device(weights: ModelWeights, device: torch.device) -> ModelWeights:
    """The same weights there; a tensor that two places share (tied embeddings) stays one."""
    moved: dict[int, torch.Tensor] = {}

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return moved.setdefault(id(tensor), tensor.to(device))

    def move_all(owner: Any) -> dict[str, torch.Tensor]:
        tensors = {field.name: getattr(owner, field.name) for field in fields(owner)}
        return {name: move(tensor) for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}

    layers = tuple(replace(layer, **move_all(layer)) for layer in weights.layers)
    return replace(weights, layers=layers, **move_all(weights))
