"""What of the forward pass differs by device: how rows are padded, multiplied, normalised, rotated and gated."""

from __future__ import annotations

from typing import Final, Protocol

import torch
from torch.nn import functional

CPU_ROW_MULTIPLE: Final = 8


class Arithmetic(Protocol):
    """Row-wise operations of a decoder. `row_multiple`: rows are padded with zero rows up to a multiple of it."""

    row_multiple: int

    def linear(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """[num_rows, in] times [out, in] transposed, in the weight's dtype: [num_rows, out]."""
        ...

    def norm(self, rows: torch.Tensor, scale: torch.Tensor, epsilon: float) -> torch.Tensor:
        """RMSNorm of float32 rows, [..., len(scale)] (arXiv:1910.07467)."""
        ...

    def rotate(self, heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        """Rotary positions of [num_tokens, num_heads, head_dim], float32, by angles, [num_tokens, head_dim / 2]."""
        ...

    def gate(self, gated: torch.Tensor) -> torch.Tensor:
        """SwiGLU of a product, [num_rows, 2 * width], gate before up, computed in float32 (arXiv:2002.05202)."""
        ...


class CpuArithmetic:
    """torch on a CPU: a row's result is the same to the bit in any batch.

    MKL takes other float32 kernels, which add in another order, for 1 to 3 rows (and, on several threads, for a few
    more counts). With whole multiples of 8 rows it does not.
    """

    row_multiple = CPU_ROW_MULTIPLE

    def linear(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See Arithmetic."""
        return functional.linear(rows.to(weight.dtype), weight)

    def norm(self, rows: torch.Tensor, scale: torch.Tensor, epsilon: float) -> torch.Tensor:
        """See Arithmetic."""
        return rows * torch.rsqrt(rows.square().mean(dim=-1, keepdim=True) + epsilon) * scale

    def rotate(self, heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        """See Arithmetic."""
        cosine, sine = cosine.unsqueeze(1), sine.unsqueeze(1)
        first, second = heads.chunk(2, dim=-1)
        return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)

    def gate(self, gated: torch.Tensor) -> torch.Tensor:
        """See Arithmetic. Gates are laid into one run of memory: torch computes what lies behind a run's last whole
        vector by another function, so in runs as wide as a row bits would depend on how many ranks share it."""
        gate, up = gated.float().chunk(2, dim=-1)
        return functional.silu(gate.contiguous(), inplace=True).mul_(up)
