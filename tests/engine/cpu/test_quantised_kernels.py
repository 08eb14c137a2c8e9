"""Products of quantised blocks are those of the dequantised matrix, to the bit, on every instruction set.

Where nothing multiplies pairs of bfloat16, blocks are unpacked to float32 in a model of either dtype (KernelLibrary).
"""

from __future__ import annotations

import pytest
import torch

from tests.engine.blocks import KINDS, random_blocks
from tests.engine.cpu.kernels import Kernels

DTYPES = (torch.float32, torch.bfloat16)
ROW_COUNTS = (*range(1, 14), 97)
SHAPES = [(64, 32), (192, 576), (1, 32), (65, 96), (200, 160)]

pytestmark = [pytest.mark.parametrize("kind", KINDS), pytest.mark.parametrize("dtype", DTYPES, ids=str)]


@pytest.mark.parametrize(("num_outputs", "num_inputs"), SHAPES)
def test_products(kernels: Kernels, kind: str, dtype: torch.dtype, num_outputs: int, num_inputs: int) -> None:
    matrix, block_dtype = random_blocks(kind, num_outputs, num_inputs), kernels.block_dtype(dtype)
    left = torch.randn(97, num_inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = kernels.multiply(left.to(block_dtype), matrix.dequantised().to(block_dtype))
    assert expected.any()
    for num_rows in ROW_COUNTS:
        assert torch.equal(kernels.multiply(left[:num_rows], matrix), expected[:num_rows]), num_rows


def test_swiglu(kernels: Kernels, kind: str, dtype: torch.dtype) -> None:
    gate_up, block_dtype = random_blocks(kind, 2 * 80, 96), kernels.block_dtype(dtype)
    left = torch.randn(13, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = kernels.swiglu(left.to(block_dtype), gate_up.dequantised().to(block_dtype))
    assert torch.equal(kernels.swiglu(left, gate_up), expected.to(dtype))


def test_rows_are_read_back(kernels: Kernels, kind: str, dtype: torch.dtype) -> None:
    """As an embedding's are."""
    matrix = random_blocks(kind, 70, 96)
    assert torch.equal(kernels.read_outputs(matrix, dtype), matrix.dequantised().to(kernels.block_dtype(dtype)).float())
