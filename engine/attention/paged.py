"""What all GPU kernels share: how KV lies in the pool, how it is written, and that a kernel is one function.

In a block each layer has its keys and then its values, token after token. A block is one run of bytes across all
layers, so that one descriptor moves it; what a kernel gets is one layer's keys or values: a view, strided over blocks
and contiguous inside one (docs/adr/0014-gpu-attention.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from engine.attention.backend import DeviceBatch

KV_LAYOUT: Final = "block,layer,key-value,token,head,dim"

# (batch, queries, keys, values) to what StepAttention.attend returns. queries: as there; keys, values: one layer's,
# [num_blocks, block_size, num_kv_heads, head_dim].
Attend = Callable[[DeviceBatch, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class PagedAttention:
    """An AttentionBackend of DeviceBatch."""

    def __init__(self, name: str, pool: torch.Tensor, attend: Attend) -> None:
        """pool: [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim], contiguous."""
        self.name = name
        self.attend = attend
        self.block_size = pool.shape[3]
        self.layers = pool.unbind(dim=1)

    def begin_step(self, batch: DeviceBatch) -> PagedStepAttention:
        """See AttentionBackend."""
        return PagedStepAttention(self, batch)


class PagedStepAttention:
    """See StepAttention."""

    def __init__(self, backend: PagedAttention, batch: DeviceBatch) -> None:
        self._backend = backend
        self._batch = batch
        self._blocks = batch.slot_mapping // backend.block_size
        self._offsets = batch.slot_mapping % backend.block_size

    def write_kv(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """See StepAttention."""
        self._backend.layers[layer][self._blocks, :, self._offsets] = torch.stack((keys, values), dim=1)

    def attend(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """See StepAttention."""
        keys, values = self._backend.layers[layer].unbind(dim=1)
        return self._backend.attend(self._batch, queries, keys, values)
