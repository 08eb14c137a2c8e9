"""Quantised matrices as a GGUF stores them: rows of blocks, each of 32 weights with their own scale.

A weight is scale * value (+ minimum), in float32. In a model folder such a matrix is a tensor of bytes,
[rows, bytes of a row], in a safetensors file whose metadata has its kind under `metadata_key`; config.json says so in
`quantization_config`, so that a reader that does not know blocks refuses the folder.
Source: ggml's block_q4_0, block_q4_1 and block_q8_0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

BLOCK_VALUES: Final = 32
SCALE_BYTES: Final = 2  # a float16; so has a minimum


@dataclass(frozen=True, slots=True)
class BlockKind:
    """value_bits: of each weight, after the scale and, where there is one, the minimum."""

    value_bits: int
    has_minimum: bool

    @property
    def block_bytes(self) -> int:
        return SCALE_BYTES * (1 + self.has_minimum) + BLOCK_VALUES * self.value_bits // 8


BLOCK_KINDS: Final = {"Q4_0": BlockKind(4, False), "Q4_1": BlockKind(4, True), "Q8_0": BlockKind(8, False)}


def metadata_key(tensor_name: str) -> str:
    """Where a safetensors file's metadata says of which kind a tensor's blocks are."""
    return f"tandem.block_kind.{tensor_name}"


@dataclass(frozen=True, slots=True)
class QuantisedMatrix:
    """[rows, inputs], of one of BLOCK_KINDS. blocks: [rows, inputs / 32, bytes of a block], uint8."""

    kind: str
    blocks: torch.Tensor

    @staticmethod
    def of_rows(kind: str, rows: torch.Tensor) -> QuantisedMatrix:
        """Of [rows, bytes of a row], uint8."""
        return QuantisedMatrix(kind, rows.view(len(rows), -1, BLOCK_KINDS[kind].block_bytes))

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.blocks), self.blocks.shape[1] * BLOCK_VALUES

    def scales(self) -> torch.Tensor:
        """[rows, blocks], float16."""
        return self._float16(0)

    def minima(self) -> torch.Tensor:
        """As `scales`, of a kind that has minima."""
        assert BLOCK_KINDS[self.kind].has_minimum
        return self._float16(SCALE_BYTES)

    def values(self) -> torch.Tensor:
        """[rows, blocks, 32]: int8 of 8 bits, uint8 of 4 bits."""
        kind = BLOCK_KINDS[self.kind]
        stored = self.blocks[..., kind.block_bytes - BLOCK_VALUES * kind.value_bits // 8 :]
        if kind.value_bits == 8:
            return stored.contiguous().view(torch.int8)
        return torch.cat((stored & 15, stored >> 4), dim=-1)

    def dequantised(self) -> torch.Tensor:
        """[rows, inputs], float32."""
        weights = self.values().float()
        if self.kind == "Q4_0":
            weights -= 8.0
        weights *= self.scales().float().unsqueeze(-1)
        if BLOCK_KINDS[self.kind].has_minimum:
            weights += self.minima().float().unsqueeze(-1)
        return weights.view(self.shape)

    def _float16(self, first_byte: int) -> torch.Tensor:
        return self.blocks[..., first_byte : first_byte + SCALE_BYTES].contiguous().view(torch.float16).squeeze(-1)


Matrix = torch.Tensor | QuantisedMatrix


def is_finite(matrix: Matrix) -> bool:
    """Whether all weights are: the integers of blocks always, so that their scales and minima decide."""
    if isinstance(matrix, torch.Tensor):
        return all(bound.isfinite() for bound in matrix.aminmax())  # NaN is both bounds
    has_minimum = BLOCK_KINDS[matrix.kind].has_minimum
    return is_finite(matrix.scales()) and not (has_minimum and not is_finite(matrix.minima()))


def as_floats(matrix: Matrix, dtype: torch.dtype) -> torch.Tensor:
    """The matrix in `dtype`; itself where it is a tensor of it."""
    return (matrix.dequantised() if isinstance(matrix, QuantisedMatrix) else matrix).to(dtype)


def stack(matrices: Sequence[Matrix], dtype: torch.dtype) -> Matrix:
    """Over one another: as blocks where all are of one kind, else in `dtype`."""
    first = matrices[0]
    if isinstance(first, QuantisedMatrix):
        blocks = [item.blocks for item in matrices if isinstance(item, QuantisedMatrix) and item.kind == first.kind]
        if len(blocks) == len(matrices):
            return QuantisedMatrix(first.kind, torch.cat(blocks))
    return torch.cat([as_floats(item, dtype) for item in matrices])
