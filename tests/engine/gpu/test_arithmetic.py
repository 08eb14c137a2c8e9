"""The exact mode's products: one shape only, so that a library has no choice of kernels."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from engine.gpu.arithmetic import TILE_ROWS, GpuArithmetic, InvariantArithmetic


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
    exact = InvariantArithmetic().linear(rows, weight)
    assert product_rows == [TILE_ROWS] * 3
    plain = GpuArithmetic().linear(rows, weight)
    assert product_rows[3:] == [3 * TILE_ROWS]
    torch.testing.assert_close(exact, plain)


def test_the_norm_is_the_formula() -> None:
    rows, scale = torch.randn(3, 2, 16), torch.randn(16)
    expected = rows * torch.rsqrt(rows.square().mean(dim=-1, keepdim=True) + 0.25) * scale
    torch.testing.assert_close(GpuArithmetic().norm(rows, scale, 0.25), expected)
