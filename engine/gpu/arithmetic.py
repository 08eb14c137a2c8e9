"""Products and norms on a GPU."""

from __future__ import annotations

from typing import Final

import torch
from torch.nn import functional

TILE_ROWS: Final = 128  # a decode's product is bound by reading the weights up to about this many rows


class GpuArithmetic:
    """One product for all rows: cuBLAS picks its kernel, and with it the order of sums, by their number."""

    row_multiple = 1

    def linear(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See Arithmetic."""
        return functional.linear(rows.to(weight.dtype), weight)

    def norm(self, rows: torch.Tensor, scale: torch.Tensor, epsilon: float) -> torch.Tensor:
        """See Arithmetic. One block of threads for each row: torch's own mean would sum by the number of rows."""
        return functional.rms_norm(rows, (rows.shape[-1],), scale, epsilon)


class InvariantArithmetic(GpuArithmetic):
    """Products always of TILE_ROWS rows, so always by one kernel: a row's result does not depend on its batch.

    Price: a decode of one sequence multiplies 128 rows, and a long prompt many small products (docs/adr/0014).
    """

    row_multiple = TILE_ROWS

    def linear(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See Arithmetic."""
        return torch.cat([super(InvariantArithmetic, self).linear(tile, weight) for tile in rows.split(TILE_ROWS)])
