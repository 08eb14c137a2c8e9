"""The interface between the model and the kernels that know how KV lies in the pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Where the tokens of one step stand, sequences one after another; for kernels that the host steers.

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


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """The same for kernels that read lengths in the device's memory, so that a captured graph can be replayed.

    slot_mapping: [num_tokens], int64.
    query_starts: [num_sequences + 1], int32, index of each sequence's first token in the step, and the end.
    context_lens: [num_sequences], int32; 0 for a padding row of a graph: it attends to nothing and gives 0.
    block_tables: [num_sequences, max_blocks], int32.
    most_queries, most_context: bounds of the lengths of a sequence; a graph's must hold in every replay.
    """

    slot_mapping: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    most_queries: int
    most_context: int


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


Batch = TypeVar("Batch", contravariant=True)


class AttentionBackend(Protocol[Batch]):
    """Kernels over one KV pool, steered by an AttentionBatch or a DeviceBatch.

    Stale pool contents must be finite: masked lanes are multiplied by 0.
    """

    name: str  # part of the numeric class

    def begin_step(self, batch: Batch) -> StepAttention:
        """Do once what all layers share: gather indices, masks, tiles."""
        ...
