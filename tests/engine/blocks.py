"""Quantised matrices for tests."""

from __future__ import annotations

from typing import Final

import gguf
import torch

from engine.quantisation import BLOCK_KINDS, QuantisedMatrix

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
