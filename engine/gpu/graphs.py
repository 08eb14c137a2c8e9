"""Decode steps as captured graphs, one for each bucket: a replay costs the host one call instead of hundreds."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from engine.adapter import AdaptedRows
from engine.attention.backend import AttentionBackend, DeviceBatch
from engine.gpu.device import Device
from engine.gpu.step_layout import GraphSizes, StepLayout
from engine.models.decoder import DecoderModel


class StepOutput(NamedTuple):
    """logits: [num_rows, vocab_size], float32. greedy_ids: [num_rows], int64; -1 where a logit is not finite."""

    logits: torch.Tensor
    greedy_ids: torch.Tensor


def compute(
    model: DecoderModel,
    attention: AttentionBackend[DeviceBatch],
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    batch: DeviceBatch,
    logit_rows: torch.Tensor,
    adapted_rows: AdaptedRows = (),
) -> StepOutput:
    """One step on the device; arguments as in DecoderModel.logits."""
    logits = model.logits(token_ids, positions, attention.begin_step(batch), logit_rows, adapted_rows)
    best, greedy_ids = logits.max(dim=-1)
    return StepOutput(logits, greedy_ids.masked_fill(~torch.isfinite(best), -1))


class DecodeGraphs:
    """Graphs of all buckets over common inputs. Made at start: capturing takes about a second each."""

    def __init__(
        self,
        device: Device,
        model: DecoderModel,
        attention: AttentionBackend[DeviceBatch],
        sizes: GraphSizes,
        block_size: int,
        scratch_block: int,
    ) -> None:
        """scratch_block: where the capture's own runs write KV. Without a bucket in `sizes` nothing is captured."""
        self._device = device
        self._most_context = sizes.table_width * block_size
        most, place = max(sizes.buckets, default=0), device.torch_device
        self._token_ids = torch.zeros(most, dtype=torch.int64, device=place)
        self._positions = torch.zeros(most, dtype=torch.int64, device=place)
        self._slots = torch.full((most,), scratch_block * block_size, dtype=torch.int64, device=place)
        self._context_lens = torch.zeros(most, dtype=torch.int32, device=place)
        self._block_tables = torch.zeros((most, sizes.table_width), dtype=torch.int32, device=place)
        self._query_starts = torch.arange(most + 1, dtype=torch.int32, device=place)
        self._rows = torch.arange(most, device=place)
        # Largest first: the smaller ones then fit into the memory that it took.
        self._replays: dict[int, Callable[[], StepOutput]] = {
            bucket: device.capture(self._step(model, attention, bucket)) for bucket in reversed(sizes.buckets)
        }

    def replay(self, layout: StepLayout) -> StepOutput:
        """The rows of all sequences of the bucket, padding included; good until the next replay."""
        bucket = layout.bucket
        assert bucket is not None
        for target, values in (
            (self._token_ids[:bucket], layout.token_ids),
            (self._positions[:bucket], layout.positions),
            (self._slots[:bucket], layout.slots),
            (self._context_lens[:bucket], layout.context_lens),
            (self._block_tables[:bucket].view(-1), layout.block_tables),
        ):
            target.copy_(self._device.stage(values), non_blocking=True)
        return self._replays[bucket]()

    def _step(
        self, model: DecoderModel, attention: AttentionBackend[DeviceBatch], bucket: int
    ) -> Callable[[], StepOutput]:
        batch = DeviceBatch(
            slot_mapping=self._slots[:bucket],
            query_starts=self._query_starts[: bucket + 1],
            context_lens=self._context_lens[:bucket],
            block_tables=self._block_tables[:bucket],
            most_queries=1,
            most_context=self._most_context,
        )
        tokens, positions, rows = self._token_ids[:bucket], self._positions[:bucket], self._rows[:bucket]
        return lambda: compute(model, attention, tokens, positions, batch, rows)
