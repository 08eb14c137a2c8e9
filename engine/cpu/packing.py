"""Weights in the order in which the kernels read them (kernels/matrix.h)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch.nn import functional

from engine.cpu.memory import HugeMemory
from engine.weights import LayerWeights, ModelWeights

PANEL_COLUMNS: Final = 32
TILE_COLUMNS: Final = 64
NUM_LANES: Final = 16
UNIT_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """One layer: matrices packed, norms and biases as in LayerWeights."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    output: torch.Tensor
    feed_forward_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    qkv_bias: torch.Tensor | None
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """`embedding` is [vocab_size, hidden_size] in the model's dtype, row-major; `head` is packed in it."""

    embedding: torch.Tensor
    layers: tuple[PackedLayer, ...]
    final_norm: torch.Tensor
    head: torch.Tensor


def pack_weights(weights: ModelWeights, dtype: torch.dtype) -> PackedWeights:
    """Copy all matrices, in the order of a forward pass, into one run of huge pages."""
    memory = HugeMemory(sum(_packed_bytes(matrix, dtype) for matrix in _matrices(weights)))

    def packed(matrix: torch.Tensor) -> torch.Tensor:
        return pack_matrix(matrix, dtype, memory)

    layers = tuple(
        PackedLayer(
            attention_norm=layer.attention_norm,
            qkv=packed(layer.qkv),
            output=packed(layer.output),
            feed_forward_norm=layer.feed_forward_norm,
            gate_up=packed(interleave_halves(layer.gate_up)),
            down=packed(layer.down),
            qkv_bias=layer.qkv_bias,
            query_norm=layer.query_norm,
            key_norm=layer.key_norm,
        )
        for layer in weights.layers
    )
    return PackedWeights(weights.embedding.to(dtype).contiguous(), layers, weights.final_norm, packed(weights.head))


def pack_matrix(matrix: torch.Tensor, dtype: torch.dtype, memory: HugeMemory) -> torch.Tensor:
    """Pack [num_outputs, num_inputs] into [num_panels, num_steps, 32 outputs, values of a unit], filled up with zeros
    to whole tiles of 64 outputs.

    A unit is 4 bytes: one float32 input or two neighbouring bfloat16 inputs of an output.
    """
    num_panels, num_steps = _packed_shape(matrix, dtype)
    values_per_unit = UNIT_BYTES // dtype.itemsize
    missing_inputs = num_steps * values_per_unit - matrix.shape[1]
    missing_outputs = num_panels * PANEL_COLUMNS - matrix.shape[0]
    filled = functional.pad(matrix.to(dtype), (0, missing_inputs, 0, missing_outputs)).contiguous()
    units = filled.view(torch.int32).view(num_panels, PANEL_COLUMNS, num_steps)
    packed = memory.tensor((num_panels, num_steps, PANEL_COLUMNS), torch.int32)
    packed.copy_(units.transpose(1, 2))
    return packed.view(dtype).view(num_panels, num_steps, PANEL_COLUMNS, values_per_unit)


def interleave_halves(gate_up: torch.Tensor) -> torch.Tensor:
    """Sixteen rows of the first half, sixteen of the second, and so on: a gate and its up end in one tile."""
    rows = gate_up.view(2, -1, NUM_LANES, gate_up.shape[1])
    return rows.transpose(0, 1).reshape(gate_up.shape)


def pad_columns(count: int) -> int:
    """To whole tiles."""
    return -(-count // TILE_COLUMNS) * TILE_COLUMNS


def _matrices(weights: ModelWeights) -> Iterator[torch.Tensor]:
    for layer in weights.layers:
        yield from _layer_matrices(layer)
    yield weights.head


def _layer_matrices(layer: LayerWeights) -> tuple[torch.Tensor, ...]:
    return layer.qkv, layer.output, layer.gate_up, layer.down


def _packed_shape(matrix: torch.Tensor, dtype: torch.dtype) -> tuple[int, int]:
    """Panels and steps."""
    num_panels = pad_columns(matrix.shape[0]) // PANEL_COLUMNS
    return num_panels, -(-matrix.shape[1] * dtype.itemsize // UNIT_BYTES)


def _packed_bytes(matrix: torch.Tensor, dtype: torch.dtype) -> int:
    num_panels, num_steps = _packed_shape(matrix, dtype)
    return num_panels * num_steps * PANEL_COLUMNS * UNIT_BYTES
