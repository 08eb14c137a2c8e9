"""What one GPU step needs, as flat numbers: laid out and decided here, on the host, where a CPU test sees all of it.

Graph or eager is decided in `lay_out` and nowhere else. A captured graph has fixed sizes, so a decode step is padded
to the next bucket; a padding row has context 0, writes its KV to the scratch block and attends to nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from engine.step import SequenceSlice

INT32, INT64 = "i", "q"  # type codes of `array`


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """The sizes that graphs are captured for.

    buckets: counts of decoding sequences, ascending.
    table_width: blocks of a block table.
    """

    buckets: tuple[int, ...]
    table_width: int


@dataclass(frozen=True, slots=True)
class StepLayout:
    """One step, sequences one after another. Fields mean what they mean in DeviceBatch (engine/attention/backend.py).

    bucket: sequences of the graph that computes it, padding included; None for an eager step.
    token_ids, positions, slots: [num_tokens], int64.
    query_starts: [num_sequences + 1], int32.
    context_lens: [num_sequences], int32.
    block_tables: [num_sequences * table_width], int32, row after row; entries past a sequence's last block are 0.
    logit_rows: [num_samples], int64, index in the step of the token that each sample follows.
    """

    bucket: int | None
    token_ids: array[int]
    positions: array[int]
    slots: array[int]
    query_starts: array[int]
    context_lens: array[int]
    block_tables: array[int]
    table_width: int
    logit_rows: array[int]
    most_queries: int
    most_context: int


def decode_buckets(max_sequences: int) -> tuple[int, ...]:
    """1, 2, 4, 8, ... and `max_sequences`."""
    powers = [1 << exponent for exponent in range(max_sequences.bit_length())]
    return (*(power for power in powers if power < max_sequences), max_sequences)


def lay_out(slices: Sequence[SequenceSlice], block_size: int, scratch_block: int, sizes: GraphSizes) -> StepLayout:
    """Flatten checked slices (engine/slice_check.py), padded to a bucket where a graph computes them.

    scratch_block: a block of the pool that belongs to nobody.
    """
    bucket = _bucket(slices, sizes)
    padding = 0 if bucket is None else bucket - len(slices)
    table_width = max(len(item.block_table) for item in slices) if bucket is None else sizes.table_width
    lengths = [len(item.token_ids) for item in slices]
    ends = list(accumulate(lengths))
    positions = array(INT64)
    slots = array(INT64)
    block_tables = array(INT32, bytes(array(INT32).itemsize * table_width * (len(slices) + padding)))
    for row, item in enumerate(slices):
        positions.extend(range(item.start, item.end))
        slots.extend(
            item.block_table[position // block_size] * block_size + position % block_size
            for position in range(item.start, item.end)
        )
        first = row * table_width
        block_tables[first : first + len(item.block_table)] = array(INT32, item.block_table)
    return StepLayout(
        bucket=bucket,
        token_ids=array(INT64, [token for item in slices for token in item.token_ids] + [0] * padding),
        positions=positions + array(INT64, [0] * padding),
        slots=slots + array(INT64, [scratch_block * block_size] * padding),
        query_starts=array(INT32, [0, *ends, *range(ends[-1] + 1, ends[-1] + 1 + padding)]),
        context_lens=array(INT32, [item.end for item in slices] + [0] * padding),
        block_tables=block_tables,
        table_width=table_width,
        logit_rows=array(
            INT64, [row for item, end in zip(slices, ends, strict=True) for row in _logit_rows(item, end)]
        ),
        most_queries=max(lengths),
        most_context=max(item.end for item in slices) if bucket is None else table_width * block_size,
    )


def _logit_rows(item: SequenceSlice, end: int) -> list[int]:
    """Of the slice that ends before token `end` of the step."""
    return [end - len(item.token_ids) + row for row in item.logit_rows]


def _bucket(slices: Sequence[SequenceSlice], sizes: GraphSizes) -> int | None:
    """The least that holds the step, or None where no graph can compute it."""
    if any(len(item.token_ids) > 1 or len(item.block_table) > sizes.table_width for item in slices):
        return None
    if any(item.adapter_digest for item in slices):  # a graph has the base's products only
        return None
    return next((bucket for bucket in sizes.buckets if bucket >= len(slices)), None)
