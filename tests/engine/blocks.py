"""Quantised matrices for tests."""

from __future__ import annotations

import math
from typing import Final

import gguf
import torch

from engine.quantisation import BLOCK_KINDS, BLOCK_VALUES, QuantisedMatrix

KINDS: Final = tuple(BLOCK_KINDS)


def gguf_type(kind: str) -> gguf.GGMLQuantizationType:
    """What a GGUF calls it."""
    return gguf.GGMLQuantizationType[kind]


def random_blocks(kind: str, num_rows: int, num_inputs: int, seed: int = 0) -> QuantisedMatrix:
    """Normally distributed weights, as a GGUF's writer quantises them; the first block holds the extremes of its kind:
    every value of 4 or 8 bits, and a scale that is no normal float16."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(num_rows, num_inputs, generator=generator)
    rows = torch.from_numpy(gguf.quantize(weights.numpy(), gguf_type(kind)))
    matrix = QuantisedMatrix.of_rows(kind, rows)
    matrix.blocks[0, 0, :2] = torch.tensor([1, 0])  # 2 ** -24
    matrix.blocks[0, 0, -16:] = torch.arange(16) * 17 ^ 0x80
    return matrix


def round_for_blocks(weights: torch.Tensor, kind: str) -> torch.Tensor:
    """Weights that a block of `kind` holds exactly, and bfloat16 too: in each block, small integers times one power of
    two, the extremes among them, so that a GGUF's writer finds that scale."""
    least, most = (-8, 7) if BLOCK_KINDS[kind].value_bits == 4 else (-127, 127)
    scale = 2.0 ** round(math.log2(3 * weights.std().item() / most))
    integers = (weights / scale).round().clamp(least, most).reshape(-1, BLOCK_VALUES)
    integers[:, 0], integers[:, 1] = least, most
    return (integers * scale).view(weights.shape)
