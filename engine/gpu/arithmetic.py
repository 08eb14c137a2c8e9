"""Products by cuBLAS, and what is done to single rows by our Triton kernels."""

from __future__ import annotations

from typing import Final

import torch
import triton
from torch.nn import functional

from engine.gpu.row_kernels import gate_rows, norm_rows, rotate_rows

TILE_ROWS: Final = 128  # a decode's product is bound by reading the weights up to about this many rows
ROWS: Final = 4  # of a program, few, so that a decode of few rows fills some multiprocessors
GATE_COLUMNS: Final = 1024


class GpuArithmetic:
    """One product for all rows: cuBLAS picks its kernel, and with it the order of sums, by their number."""

    name = "plain"
    row_multiple = 1

    def linear(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See Arithmetic."""
        return functional.linear(rows.to(weight.dtype), weight)

    def norm(self, rows: torch.Tensor, scale: torch.Tensor, epsilon: float) -> torch.Tensor:
        """See Arithmetic. torch's own mean would sum in an order that depends on the number of rows."""
        rows = rows.contiguous()
        output, width = torch.empty_like(rows), rows.shape[-1]
        num_rows = rows.numel() // width
        grid = (triton.cdiv(num_rows, ROWS),)
        norm_rows[grid](rows, scale, output, num_rows, epsilon, width, triton.next_power_of_2(width), ROWS)
        return output

    def rotate(self, heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        """See Arithmetic."""
        num_tokens, num_heads, head_dim = heads.shape
        output, half = heads.new_empty(heads.shape), head_dim // 2
        rotate_rows[(triton.cdiv(num_tokens * num_heads, ROWS),)](
            heads,
            cosine,
            sine,
            output,
            num_tokens * num_heads,
            num_heads,
            *heads.stride()[:2],
            half,
            triton.next_power_of_2(half),
            ROWS,
        )
        return output

    def gate(self, gated: torch.Tensor) -> torch.Tensor:
        """See Arithmetic."""
        num_rows, width = gated.shape[0], gated.shape[1] // 2
        output = gated.new_empty((num_rows, width))
        columns = min(GATE_COLUMNS, triton.next_power_of_2(width))
        grid = (triton.cdiv(num_rows, ROWS), triton.cdiv(width, columns))
        gate_rows[grid](gated, output, num_rows, width, columns, ROWS)
        return output


class ExactArithmetic(GpuArithmetic):
    """Products always of TILE_ROWS rows, so always by one kernel: a row's result does not depend on its batch.

    Price: a decode of one sequence multiplies 128 rows, and a long prompt many small products
    (docs/adr/0014-gpu-attention.md).
    """

    name = "exact"
    row_multiple = TILE_ROWS

    def linear(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See Arithmetic. `rows` are padded to whole tiles."""
        return torch.cat([super(ExactArithmetic, self).linear(tile, weight) for tile in rows.split(TILE_ROWS)])
