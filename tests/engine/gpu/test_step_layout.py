"""What a GPU step is made of, and when a graph computes it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.request import SamplingParams
from engine.gpu.step_layout import GraphSizes, decode_buckets, lay_out
from engine.step import SampleSpec, SequenceSlice

BLOCK_SIZE = 4
SCRATCH_BLOCK = 99
SAMPLE = SampleSpec(SamplingParams(temperature=0.0), 0)
SIZES = GraphSizes(buckets=(1, 2, 4), table_width=5)


def decode(start: int, *blocks: int, samples: tuple[SampleSpec, ...] = (SAMPLE,)) -> SequenceSlice:
    return SequenceSlice("decode", (700 + start,), start, blocks, samples)


@pytest.mark.parametrize(
    ("max_sequences", "expected"),
    [(1, (1,)), (2, (1, 2)), (5, (1, 2, 4, 5)), (8, (1, 2, 4, 8)), (256, (1, 2, 4, 8, 16, 32, 64, 128, 256))],
)
def test_buckets_are_powers_of_two_up_to_the_most(max_sequences: int, expected: tuple[int, ...]) -> None:
    assert decode_buckets(max_sequences) == expected


def test_a_mixed_step_is_eager_and_lies_as_planned() -> None:
    chunk = SequenceSlice("chunk", (10, 11, 12), 3, (7, 2))
    layout = lay_out((decode(4, 5, 6), chunk), BLOCK_SIZE, SCRATCH_BLOCK, SIZES)
    assert layout.bucket is None
    assert list(layout.token_ids) == [704, 10, 11, 12]
    assert list(layout.positions) == [4, 3, 4, 5]
    assert list(layout.slots) == [6 * 4, 7 * 4 + 3, 2 * 4, 2 * 4 + 1]
    assert list(layout.query_starts) == [0, 1, 4]
    assert list(layout.context_lens) == [5, 6]
    assert (layout.table_width, list(layout.block_tables)) == (2, [5, 6, 7, 2])
    assert list(layout.logit_rows) == [0]  # the chunk samples nothing
    assert (layout.most_queries, layout.most_context) == (3, 6)


def test_a_decode_step_is_padded_to_its_bucket_with_rows_that_touch_nothing() -> None:
    layout = lay_out(
        (decode(4, 5, 6), decode(0, 3), decode(1, 8, samples=(SAMPLE, SAMPLE))), BLOCK_SIZE, SCRATCH_BLOCK, SIZES
    )
    assert layout.bucket == 4
    assert list(layout.token_ids) == [704, 700, 701, 0]
    assert list(layout.slots) == [24, 12, 33, SCRATCH_BLOCK * BLOCK_SIZE]
    assert list(layout.query_starts) == [0, 1, 2, 3, 4]
    assert list(layout.context_lens) == [5, 1, 2, 0]
    assert list(layout.block_tables) == [5, 6, 0, 0, 0, 3, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    assert list(layout.logit_rows) == [0, 1, 2, 2]  # the last is continued twice
    assert layout.most_context == SIZES.table_width * BLOCK_SIZE  # a graph's bound, not the step's


def test_what_no_graph_was_captured_for_is_eager() -> None:
    fits, too_wide = decode(16, 1, 2, 3, 4, 5), decode(20, 1, 2, 3, 4, 5, 6)
    buckets = [
        lay_out(slices, BLOCK_SIZE, SCRATCH_BLOCK, SIZES).bucket
        for slices in ((fits,), (fits,) * 4, (fits,) * 5, (too_wide,), (SequenceSlice("a", (1, 2), 0, (1,)),))
    ]
    assert buckets == [1, 4, None, None, None]
    assert lay_out((fits,), BLOCK_SIZE, SCRATCH_BLOCK, GraphSizes((), 5)).bucket is None


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 30), st.booleans()), min_size=1, max_size=6), st.data())
def test_every_token_has_its_own_position_and_slot(lengths: list[tuple[int, int, bool]], data: st.DataObject) -> None:
    free = data.draw(st.permutations(range(90)))
    slices, owners = [], []
    for index, (num_tokens, start, samples) in enumerate(lengths):
        blocks = tuple(free.pop() for _ in range(-(-(start + num_tokens) // BLOCK_SIZE)))
        tokens = tuple(range(100 * index, 100 * index + num_tokens))
        slices.append(SequenceSlice(str(index), tokens, start, blocks, (SAMPLE,) * samples))
        owners += [(slices[-1], offset) for offset in range(num_tokens)]
    layout = lay_out(slices, BLOCK_SIZE, SCRATCH_BLOCK, SIZES)
    for row, (item, offset) in enumerate(owners):
        position = item.start + offset
        assert layout.token_ids[row] == item.token_ids[offset]
        assert layout.positions[row] == position
        assert divmod(layout.slots[row], BLOCK_SIZE) == (
            item.block_table[position // BLOCK_SIZE],
            position % BLOCK_SIZE,
        )
    width = layout.table_width
    for row, item in enumerate(slices):
        assert tuple(layout.block_tables[row * width :][: len(item.block_table)]) == item.block_table
        assert layout.query_starts[row + 1] - layout.query_starts[row] == len(item.token_ids)
        assert layout.context_lens[row] == item.end
    padding = (layout.bucket or len(slices)) - len(slices)
    assert len(layout.slots) == len(owners) + padding
    assert len(layout.block_tables) == width * (len(slices) + padding)
