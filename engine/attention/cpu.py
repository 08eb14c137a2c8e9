"""Paged attention out of torch operations, exact to the bit for every way of batching the same token.

A token's result must not depend on its neighbours, on the chunk it came in or on the padding around it, so every
sum runs in an order that only the token's own context fixes:
- scores: each is one dot product over head_dim; MKL adds it in the same order for any matrix of at least 4 rows;
- sums over the context run in segments of SEGMENT_TOKENS keys, added one after another. Keys that a row may not
  see have weight exactly 0, so padding segments add exact zeros.
Tests hold this with equality (tests/engine/test_invariance.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from core.errors import BadRequest
from engine.attention.backend import AttentionBatch

SEGMENT_TOKENS = 128  # below MKL's own split of a sum, which would depend on the matrix's shape
QUERY_TILE_TOKENS = 128  # prefill rows per tile: scores of a tile stay in cache, little is computed above the diagonal
GATHER_TOKENS = 2048  # padded context that a decode tile gathers at most: its keys and values stay in cache
ROW_MULTIPLE = 8  # MKL takes other kernels, with another order of sums, below 4 rows


@dataclass(frozen=True, slots=True)
class _Tile:
    """Some sequences with equally many queries each, padded to one context length.

    token_rows: [num_sequences * num_queries], int64, index of each query in the step.
    pool_rows: [num_sequences * num_kv_heads * num_blocks], int64, rows of the pool that hold layer 0's keys.
    hidden: [num_sequences, 1, num_rows, context - first_hidden], bool, True where a row must not see a key.
    first_hidden: keys before it are seen by every row.
    """

    num_sequences: int
    num_queries: int
    num_rows: int  # queries x heads of one group, padded to ROW_MULTIPLE
    context: int  # padded to SEGMENT_TOKENS
    token_rows: torch.Tensor
    pool_rows: torch.Tensor
    hidden: torch.Tensor
    first_hidden: int


class _Scratch:
    """Memory that gathers reuse: fresh memory of this size costs more in page faults than the copy itself."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._gathered = torch.empty(0, dtype=dtype)
        self._converted = torch.empty(0)

    def gather(self, source: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """source[rows] in float32, valid until the next call."""
        if self._gathered.numel() < len(rows) * source.shape[1]:
            self._gathered = torch.empty(len(rows) * source.shape[1], dtype=source.dtype)
            self._converted = torch.empty(self._gathered.shape)
        gathered = self._gathered[: len(rows) * source.shape[1]].view(len(rows), -1)
        torch.index_select(source, 0, rows, out=gathered)
        if source.dtype == torch.float32:
            return gathered
        return self._converted[: gathered.numel()].view_as(gathered).copy_(gathered)


class CpuAttention:
    """Backend over a pool in host memory: gathers pages into padded batches, then multiplies matrices.

    Source: PagedAttention, arXiv:2309.06180; grouped heads, arXiv:2305.13245.
    """

    name = "torch"

    def __init__(self, pool: torch.Tensor, num_heads: int) -> None:
        """pool: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], contiguous, float32 or bfloat16.

        Raises: BadRequest: on `block_size`: a segment of the context is not a whole number of blocks.
        """
        _, self.num_layers, _, self.num_kv_heads, self.block_size, self.head_dim = pool.shape
        if SEGMENT_TOKENS % self.block_size:
            raise BadRequest("block_size", f"must divide {SEGMENT_TOKENS}, got {self.block_size}")
        self.num_heads = num_heads
        self.pool_runs = pool.view(-1, self.block_size * self.head_dim)  # one row: a block of one head's keys or values
        self.pool_slots = pool.view(-1, self.head_dim)  # one row: one token of one head
        self.scratch = (_Scratch(pool.dtype), _Scratch(pool.dtype))  # of keys, of values

    def begin_step(self, batch: AttentionBatch) -> CpuStepAttention:
        """See AttentionBackend."""
        return CpuStepAttention(self, batch)

    def key_runs(self, block_ids: torch.Tensor) -> torch.Tensor:
        """Rows of `pool_runs` with layer 0's keys: [..., num_blocks] -> [..., num_kv_heads, num_blocks]."""
        heads = torch.arange(self.num_kv_heads).unsqueeze(-1)
        return block_ids.unsqueeze(-2) * (self.num_layers * 2 * self.num_kv_heads) + heads


class CpuStepAttention:
    """See StepAttention."""

    def __init__(self, backend: CpuAttention, batch: AttentionBatch) -> None:
        self._backend = backend
        self._key_slots = self._layer0_key_slots(batch.slot_mapping)
        self._tiles = _make_tiles(backend, batch)

    def write_kv(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """See StepAttention."""
        backend = self._backend
        head_stride = backend.num_kv_heads * backend.block_size
        slots = self._key_slots + layer * 2 * head_stride
        backend.pool_slots.index_copy_(0, slots, keys.reshape(-1, backend.head_dim))
        backend.pool_slots.index_copy_(0, slots + head_stride, values.reshape(-1, backend.head_dim))

    def attend(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """See StepAttention."""
        scaled = queries * self._backend.head_dim**-0.5
        output = torch.empty_like(queries)
        for tile in self._tiles:
            output[tile.token_rows] = self._attend_tile(layer, tile, scaled[tile.token_rows])
        return output

    def _layer0_key_slots(self, slot_mapping: torch.Tensor) -> torch.Tensor:
        """Rows of `pool_slots` for each token and head, [num_tokens * num_kv_heads], int64."""
        block_size = self._backend.block_size
        runs = self._backend.key_runs((slot_mapping // block_size).unsqueeze(-1)).squeeze(-1)
        return (runs * block_size + (slot_mapping % block_size).unsqueeze(-1)).reshape(-1)

    def _attend_tile(self, layer: int, tile: _Tile, queries: torch.Tensor) -> torch.Tensor:
        """[num_sequences * num_queries, num_heads, head_dim] in and out, float32, scaled."""
        keys = self._gather(tile, layer * 2)
        values = self._gather(tile, layer * 2 + 1)
        scores = torch.bmm(self._to_rows(tile, queries), keys.transpose(1, 2))
        by_sequence = scores.view(tile.num_sequences, -1, tile.num_rows, tile.context)
        by_sequence[..., tile.first_hidden :].masked_fill_(tile.hidden, float("-inf"))
        by_sequence = values.view(tile.num_sequences, -1, tile.context, values.shape[-1])
        by_sequence[:, :, tile.first_hidden :].masked_fill_(tile.hidden[:, :, -1:].transpose(2, 3), 0.0)  # may be NaN
        scores.sub_(scores.amax(dim=-1, keepdim=True)).exp_()
        return self._from_rows(tile, _weighted_mean(scores, values))

    def _gather(self, tile: _Tile, half: int) -> torch.Tensor:
        """Keys (even half) or values (odd half) of a layer, good until the same half is gathered again.

        Returns: [num_sequences * num_kv_heads, context, head_dim], float32.
        """
        backend = self._backend
        runs = backend.scratch[half % 2].gather(backend.pool_runs, tile.pool_rows + half * backend.num_kv_heads)
        return runs.view(-1, tile.context, backend.head_dim)

    def _to_rows(self, tile: _Tile, queries: torch.Tensor) -> torch.Tensor:
        """Queries that share a KV head as rows of one matrix, [num_sequences * num_kv_heads, num_rows, head_dim]."""
        backend = self._backend
        grouped = queries.view(tile.num_sequences, tile.num_queries, backend.num_kv_heads, -1, backend.head_dim)
        rows = grouped.transpose(1, 2).reshape(tile.num_sequences * backend.num_kv_heads, -1, backend.head_dim)
        return torch.nn.functional.pad(rows, (0, 0, 0, tile.num_rows - rows.shape[1]))

    def _from_rows(self, tile: _Tile, rows: torch.Tensor) -> torch.Tensor:
        """The inverse of `_to_rows`."""
        backend = self._backend
        group = backend.num_heads // backend.num_kv_heads
        kept = rows[:, : tile.num_queries * group]
        grouped = kept.reshape(tile.num_sequences, backend.num_kv_heads, tile.num_queries, group, backend.head_dim)
        return grouped.transpose(1, 2).reshape(-1, backend.num_heads, backend.head_dim)


def _weighted_mean(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """sum(weights x values) / sum(weights) over the context, segment by segment in order.

    Args:
        weights: [batch, num_rows, context], float32, not negative.
        values: [batch, context, head_dim], float32.
    Returns: [batch, num_rows, head_dim], float32.
    """
    batch, num_rows, context = weights.shape
    output = torch.zeros(batch, num_rows, values.shape[-1])
    total = torch.zeros(batch, num_rows, 1)
    for start in range(0, context, SEGMENT_TOKENS):
        segment = weights[..., start : start + SEGMENT_TOKENS]
        output.baddbmm_(segment, values[:, start : start + SEGMENT_TOKENS])
        total += segment.sum(dim=-1, keepdim=True)
    return output.div_(total)


def _make_tiles(backend: CpuAttention, batch: AttentionBatch) -> list[_Tile]:
    """Decodes are grouped by similar context; each longer run of queries is cut into tiles of its own."""
    starts = [0]
    for length in batch.query_lens:
        starts.append(starts[-1] + length)
    decodes = [index for index, length in enumerate(batch.query_lens) if length == 1]
    tiles = [
        _tile(backend, batch, group, [starts[index] for index in group], 1)
        for group in _group_by_context(decodes, batch.context_lens)
    ]
    for index, length in enumerate(batch.query_lens):
        if length > 1:
            for offset in range(0, length, QUERY_TILE_TOKENS):
                num_queries = min(QUERY_TILE_TOKENS, length - offset)
                tiles.append(_tile(backend, batch, [index], [starts[index] + offset], num_queries))
    return tiles


def _group_by_context(indices: list[int], context_lens: tuple[int, ...]) -> list[list[int]]:
    """Sequences of similar context length, so many to a group that the padded group keeps to GATHER_TOKENS."""
    groups: list[list[int]] = []
    for index in sorted(indices, key=lambda item: context_lens[item], reverse=True):
        if groups and (len(groups[-1]) + 1) * _pad(context_lens[groups[-1][0]], SEGMENT_TOKENS) <= GATHER_TOKENS:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _tile(
    backend: CpuAttention, batch: AttentionBatch, sequences: list[int], first_tokens: list[int], num_queries: int
) -> _Tile:
    """The tile of `num_queries` queries of each sequence, the first of which stands at `first_tokens` in the step."""
    token_rows = torch.tensor(first_tokens).unsqueeze(-1) + torch.arange(num_queries)
    positions = batch.positions[token_rows]
    context = _pad(int(positions.max()) + 1, SEGMENT_TOKENS)
    num_blocks = context // backend.block_size
    tables = batch.block_tables[sequences][:, :num_blocks]
    tables = torch.nn.functional.pad(tables, (0, num_blocks - tables.shape[1]))
    group = backend.num_heads // backend.num_kv_heads
    num_rows = _pad(num_queries * group, ROW_MULTIPLE)
    row_queries = (torch.arange(num_rows) // group).clamp_(
        max=num_queries - 1
    )  # padding rows see what the last one sees
    first_hidden = int(positions.min()) + 1
    hidden = torch.arange(first_hidden, context) > positions[:, row_queries].unsqueeze(-1)
    return _Tile(
        num_sequences=len(sequences),
        num_queries=num_queries,
        num_rows=num_rows,
        context=context,
        token_rows=token_rows.reshape(-1),
        pool_rows=backend.key_runs(tables).reshape(-1),
        hidden=hidden.unsqueeze(1),
        first_hidden=first_hidden,
    )


def _pad(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
