"""The interface between the model and the kernels that know how KV lies in the pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Where the tokens of one step stand, sequences one after another.

    positions: [num_tokens], int64, absolute position of each token in its sequence.
    slot_mapping: [num_tokens], int64, block_id * block_size + offset: where the token's KV is written.
    query_lens: tokens of each sequence in this step.
    context_lens: tokens of each sequence in the pool once this step is written.
    block_tables: [num_sequences, max_blocks], int64; entries past a sequence's last block are 0 and ignored.
    """

    positions: torch.Tensor
    slot_mapping: torch.Tensor
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    block_tables: torch.Tensor


class StepAttention(Protocol):
    """Attention of one step: made once, used by every layer."""

    def write_kv(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store the step's keys (rotated) and values, each [num_tokens, num_kv_heads, head_dim], in their slots."""
        ...

    def attend(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """Causal attention of the step's tokens over their whole context; call after `write_kv` of the layer.

        Args:
            queries: [num_tokens, num_heads, head_dim], float32, rotated, not scaled.
        Returns: [num_tokens, num_heads, head_dim], float32.
        """
        ...


class AttentionBackend(Protocol):
    """Kernels over one KV pool. Stale pool contents must be finite: masked lanes are multiplied by 0."""

    name: str  # part of the numeric class

    def begin_step(self, batch: AttentionBatch) -> StepAttention:
        """Do once what all layers share: gather indices, masks, tiles."""
        ...
