"""The GPU's row kernels, interpreted, against torch's operations; and that the exact mode's products have one shape."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from engine.gpu.arithmetic import TILE_ROWS, ExactArithmetic, GpuArithmetic
from engine.models.arithmetic import CpuArithmetic

GPU, CPU = GpuArithmetic(), CpuArithmetic()


@pytest.fixture
def product_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each product, as they are asked for."""
    rows: list[int] = []
    original = functional.linear

    def counted(left: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows.append(len(left))
        return original(left, weight)

    monkeypatch.setattr(functional, "linear", counted)
    return rows


def test_products_have_one_shape_in_the_exact_mode_only(product_rows: list[int]) -> None:
    rows, weight = torch.randn(3 * TILE_ROWS, 8), torch.randn(5, 8)
    exact = ExactArithmetic().linear(rows, weight)
    assert product_rows == [TILE_ROWS] * 3
    plain = GPU.linear(rows, weight)
    assert product_rows[3:] == [3 * TILE_ROWS]
    torch.testing.assert_close(exact, plain)


@pytest.mark.parametrize("shape", [(1, 96), (9, 64), (3, 2, 24)], ids=str)
def test_norms_of_rows_and_of_heads(shape: tuple[int, ...]) -> None:
    rows, scale = torch.randn(shape) * 3, torch.randn(shape[-1])
    torch.testing.assert_close(GPU.norm(rows, scale, 0.25), CPU.norm(rows, scale, 0.25))


@pytest.mark.parametrize(("num_heads", "head_dim"), [(3, 64), (2, 24)])
def test_rotation_of_heads_that_are_part_of_a_product(num_heads: int, head_dim: int) -> None:
    heads = torch.randn(5, num_heads + 4, head_dim)[:, 1 : 1 + num_heads]
    cosine, sine = torch.randn(2, 5, head_dim // 2)
    torch.testing.assert_close(GPU.rotate(heads, cosine, sine), CPU.rotate(heads, cosine, sine))
    assert not torch.equal(GPU.rotate(heads, cosine, sine), heads)


@pytest.mark.parametrize("width", [160, 1536])
def test_gates_wider_than_a_program_in_either_dtype(width: int) -> None:
    gated = torch.randn(5, 2 * width) * 3
    torch.testing.assert_close(GPU.gate(gated), CPU.gate(gated.clone()))
    rounded = gated.bfloat16()
    assert GPU.gate(rounded).dtype == torch.bfloat16
    # A whole unit in the last place: the interpreter rounds to bfloat16 by cutting off.
    torch.testing.assert_close(GPU.gate(rounded).float(), GPU.gate(rounded.float()), rtol=2**-7, atol=0.0)
