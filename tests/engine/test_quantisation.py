from __future__ import annotations

import gguf
import pytest
import torch

from engine.quantisation import BLOCK_KINDS, QuantisedMatrix, as_floats, is_finite, stack
from tests.engine.blocks import KINDS, gguf_type, random_blocks

NAN, INFINITY = (0x00, 0x7E), (0x00, 0x7C)  # float16, low byte first


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_that_gguf_dequantises(kind: str) -> None:
    matrix = random_blocks(kind, 5, 96)
    expected = gguf.dequantize(matrix.blocks.flatten(1).numpy(), gguf_type(kind))
    assert matrix.shape == (5, 96)
    assert torch.equal(matrix.dequantised(), torch.from_numpy(expected))
    assert torch.equal(as_floats(matrix, torch.bfloat16), torch.from_numpy(expected).bfloat16())


def test_one_kind_is_stacked_as_blocks() -> None:
    upper, lower = random_blocks("Q4_1", 3, 64), random_blocks("Q4_1", 2, 64, seed=1)
    stacked = stack([upper, lower], torch.float32)
    assert isinstance(stacked, QuantisedMatrix)
    assert torch.equal(stacked.dequantised(), torch.cat([upper.dequantised(), lower.dequantised()]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_several_kinds_are_stacked_as_floats(dtype: torch.dtype) -> None:
    parts = [random_blocks("Q4_1", 3, 64), random_blocks("Q8_0", 2, 64), torch.ones(1, 64)]
    for order in (parts, parts[::-1]):
        stacked = stack(order, dtype)
        assert isinstance(stacked, torch.Tensor)
        assert torch.equal(stacked, torch.cat([as_floats(part, dtype) for part in order]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [NAN, INFINITY])
def test_factors_that_are_not_finite_are_found(kind: str, bad: tuple[int, int]) -> None:
    matrix = random_blocks(kind, 5, 96)
    assert is_finite(matrix)
    for first_byte in (0, 2) if BLOCK_KINDS[kind].has_minimum else (0,):
        damaged = QuantisedMatrix(kind, matrix.blocks.clone())
        damaged.blocks[4, 2, first_byte : first_byte + 2] = torch.tensor(bad)
        assert not is_finite(damaged)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_floats_that_are_not_finite_are_found(dtype: torch.dtype, bad: float) -> None:
    matrix = torch.randn(5, 96).to(dtype)
    assert is_finite(matrix)
    matrix[4, 95] = bad
    assert not is_finite(matrix)
