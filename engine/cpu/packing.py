"""Weights in the order in which the kernels read them (kernels/matrix.h, kernels/quantised.h)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch.nn import functional

from engine.adapter import AdapterWeights, LowRank
from engine.cpu.memory import HugeMemory
from engine.quantisation import BLOCK_KINDS, BLOCK_VALUES, Matrix, QuantisedMatrix
from engine.weights import Layer, StoredWeights

PANEL_COLUMNS: Final = 32
TILE_COLUMNS: Final = 64
NUM_LANES: Final = 16
UNIT_BYTES: Final = 4
WORD_STEPS: Final = 8  # values of 4 bits in a word


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """kind: of the blocks, None where the weights are floats of the model's dtype."""

    data: torch.Tensor
    kind: str | None = None


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """One layer: matrices packed, norms and biases as in Layer."""

    attention_norm: torch.Tensor
    qkv: PackedMatrix
    output: PackedMatrix
    feed_forward_norm: torch.Tensor
    gate_up: PackedMatrix
    down: PackedMatrix
    qkv_bias: torch.Tensor | None
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """`embedding` is [vocab_size, hidden_size], row-major, where it is of floats; else it is packed like the others."""

    embedding: PackedMatrix
    layers: tuple[PackedLayer, ...]
    final_norm: torch.Tensor
    head: PackedMatrix


def pack_weights(weights: StoredWeights, dtype: torch.dtype, block_dtype: torch.dtype) -> PackedWeights:
    """Copy all matrices, in the order of a forward pass, into one run of huge pages. See pack_matrix."""
    memory = HugeMemory(sum(_packed_bytes(matrix, dtype) for matrix in _matrices(weights)))

    def packed(matrix: Matrix) -> PackedMatrix:
        return pack_matrix(matrix, dtype, memory, block_dtype)

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
    head = packed(weights.head)
    if isinstance(weights.embedding, torch.Tensor):
        embedding = PackedMatrix(weights.embedding.to(dtype).contiguous())
    else:
        embedding = head if weights.embedding is weights.head else packed(weights.embedding)
    return PackedWeights(embedding, layers, weights.final_norm, head)


@dataclass(frozen=True, slots=True)
class PackedLowRank:
    """As LowRank, packed."""

    shrink: PackedMatrix
    expand: PackedMatrix
    rank: int


@dataclass(frozen=True, slots=True)
class PackedAdapterLayer:
    """As AdapterLayer; `gate_up.expand` has its rows in the order of the layer's `gate_up`."""

    qkv: PackedLowRank | None
    output: PackedLowRank | None
    gate_up: PackedLowRank | None
    down: PackedLowRank | None


def pack_adapter(adapter: AdapterWeights, dtype: torch.dtype) -> tuple[PackedAdapterLayer, ...]:
    """Copy all matrices into one run of memory."""
    pairs = [pair for layer in adapter for pair in (layer.qkv, layer.output, layer.gate_up, layer.down) if pair]
    memory = HugeMemory(sum(_packed_bytes(half, dtype) for pair in pairs for half in (pair.shrink, pair.expand)))

    def packed(pair: LowRank | None, *, halves: bool = False) -> PackedLowRank | None:
        if pair is None:
            return None
        expand = _interleave_rows(pair.expand) if halves else pair.expand
        return PackedLowRank(
            PackedMatrix(_pack_floats(pair.shrink, dtype, memory)),
            PackedMatrix(_pack_floats(expand, dtype, memory)),
            len(pair.shrink),
        )

    return tuple(
        PackedAdapterLayer(
            packed(layer.qkv), packed(layer.output), packed(layer.gate_up, halves=True), packed(layer.down)
        )
        for layer in adapter
    )


def pack_matrix(matrix: Matrix, dtype: torch.dtype, memory: HugeMemory, block_dtype: torch.dtype) -> PackedMatrix:
    """Pack [num_outputs, num_inputs], filled up with zeros to whole tiles of 64 outputs.

    The order is that of the units that a product takes: a unit is 4 bytes, one float32 input or two neighbouring
    bfloat16 inputs of an output; [num_panels, num_steps, 32 outputs, values of a unit]. Blocks stay blocks, in the
    order of the units of `block_dtype` that they become.
    """
    if isinstance(matrix, QuantisedMatrix):
        return PackedMatrix(_pack_blocks(matrix, UNIT_BYTES // block_dtype.itemsize, memory), matrix.kind)
    return PackedMatrix(_pack_floats(matrix, dtype, memory))


def _pack_floats(matrix: torch.Tensor, dtype: torch.dtype, memory: HugeMemory) -> torch.Tensor:
    num_panels, num_steps = _packed_shape(matrix, dtype)
    values_per_unit = UNIT_BYTES // dtype.itemsize
    missing_inputs = num_steps * values_per_unit - matrix.shape[1]
    missing_outputs = num_panels * PANEL_COLUMNS - matrix.shape[0]
    filled = functional.pad(matrix.to(dtype), (0, missing_inputs, 0, missing_outputs)).contiguous()
    units = filled.view(torch.int32).view(num_panels, PANEL_COLUMNS, num_steps)
    packed = memory.tensor((num_panels, num_steps, PANEL_COLUMNS), torch.int32)
    packed.copy_(units.transpose(1, 2))
    return packed.view(dtype).view(num_panels, num_steps, PANEL_COLUMNS, values_per_unit)


def _pack_blocks(matrix: QuantisedMatrix, values_per_unit: int, memory: HugeMemory) -> torch.Tensor:
    """[num_panels, blocks of a row, bytes]: of a panel's block, 32 scales, 32 minima if any, then the values."""
    num_panels = pad_columns(matrix.shape[0]) // PANEL_COLUMNS
    missing = num_panels * PANEL_COLUMNS - matrix.shape[0]
    filled = QuantisedMatrix(matrix.kind, functional.pad(matrix.blocks, (0, 0, 0, 0, 0, missing)))
    kind, num_blocks = BLOCK_KINDS[matrix.kind], matrix.blocks.shape[1]
    packed = memory.tensor((num_panels, num_blocks, PANEL_COLUMNS * kind.block_bytes), torch.uint8)
    float16s = [filled.scales(), filled.minima()] if kind.has_minimum else [filled.scales()]
    first = 0
    for of_rows in float16s:
        by_panel = of_rows.view(num_panels, PANEL_COLUMNS, num_blocks).transpose(1, 2).contiguous().view(torch.uint8)
        packed[..., first : first + by_panel.shape[-1]] = by_panel
        first += by_panel.shape[-1]
    num_steps = BLOCK_VALUES // values_per_unit
    values = filled.values().view(num_panels, PANEL_COLUMNS, num_blocks, num_steps, values_per_unit)
    in_order = values.permute(0, 2, 3, 1, 4)  # [panels, blocks, steps, outputs, values of a unit]
    if kind.value_bits == 4:
        in_order = _words_of_4_bits(in_order.reshape(num_panels, num_blocks, num_steps, -1, NUM_LANES))
    packed[..., first:] = in_order.reshape(num_panels, num_blocks, -1).view(torch.uint8)
    return packed


def _words_of_4_bits(values: torch.Tensor) -> torch.Tensor:
    """[panels, blocks, steps, groups, lanes] to [..., steps / 8, groups, lanes, 4 bytes], the first step lowest."""
    panels, blocks, steps, groups, lanes = values.shape
    words = values.view(panels, blocks, steps // WORD_STEPS, WORD_STEPS, groups, lanes).permute(0, 1, 2, 4, 5, 3)
    return words[..., ::2] | words[..., 1::2] << 4


def interleave_halves(gate_up: Matrix) -> Matrix:
    """Sixteen rows of the first half, sixteen of the second, and so on: a gate and its up end in one tile."""
    if isinstance(gate_up, QuantisedMatrix):
        return QuantisedMatrix(gate_up.kind, _interleave_rows(gate_up.blocks))
    return _interleave_rows(gate_up)


def _interleave_rows(rows: torch.Tensor) -> torch.Tensor:
    sixteens = rows.view(2, -1, NUM_LANES, *rows.shape[1:])
    return sixteens.transpose(0, 1).reshape(rows.shape)


def pad_columns(count: int) -> int:
    """To whole tiles."""
    return -(-count // TILE_COLUMNS) * TILE_COLUMNS


def has_blocks(weights: StoredWeights) -> bool:
    """Whether any matrix is of blocks."""
    return any(isinstance(matrix, QuantisedMatrix) for matrix in _matrices(weights))


def _matrices(weights: StoredWeights) -> Iterator[Matrix]:
    """All that are packed."""
    for layer in weights.layers:
        yield from _layer_matrices(layer)
    yield weights.head
    if isinstance(weights.embedding, QuantisedMatrix) and weights.embedding is not weights.head:
        yield weights.embedding


def _layer_matrices(layer: Layer[Matrix]) -> tuple[Matrix, ...]:
    return layer.qkv, layer.output, layer.gate_up, layer.down


def _packed_shape(matrix: torch.Tensor, dtype: torch.dtype) -> tuple[int, int]:
    """Panels and steps."""
    num_panels = pad_columns(matrix.shape[0]) // PANEL_COLUMNS
    return num_panels, -(-matrix.shape[1] * dtype.itemsize // UNIT_BYTES)


def _packed_bytes(matrix: Matrix, dtype: torch.dtype) -> int:
    if isinstance(matrix, QuantisedMatrix):
        return pad_columns(matrix.shape[0]) * matrix.blocks.shape[1] * matrix.blocks.shape[2]
    num_panels, num_steps = _packed_shape(matrix, dtype)
    return num_panels * num_steps * PANEL_COLUMNS * UNIT_BYTES
