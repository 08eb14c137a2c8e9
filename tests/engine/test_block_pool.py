"""References, cache and quarantine: every block in one place, whatever is done in whatever order."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import InvariantBroken
from core.identity import BlockHash
from engine.block_pool import BlockPool


def name(text: str) -> BlockHash:
    return BlockHash(text.encode())


def cached(pool: BlockPool, *names: str) -> list[int]:
    """Blocks that hold these hashes, released in one table."""
    blocks = pool.allocate(len(names))
    assert blocks is not None
    for block, text in zip(blocks, names, strict=True):
        pool.cache(block, name(text))
    pool.release(blocks)
    return blocks


def test_a_released_cached_block_is_found_again_and_another_hash_is_not() -> None:
    pool = BlockPool(4)
    blocks = cached(pool, "a", "b")
    assert pool.match([name("a"), name("b"), name("c")]) == blocks
    assert pool.match([name("b2")]) == []
    assert pool.acquire([name("a"), name("b")], 3) == (blocks, [2])
    assert (pool.num_used, pool.num_free) == (3, 1)


def test_a_hit_that_needs_more_than_there_is_changes_nothing() -> None:
    pool = BlockPool(3)
    blocks = cached(pool, "a", "b")
    pool.moves.take()
    assert pool.acquire([name("a"), name("b")], 4) is None
    assert pool.num_free == 3
    assert pool.match([name("a"), name("b")]) == blocks
    assert pool.moves.take().evicted == ()


def test_the_tail_of_a_table_is_evicted_before_its_head() -> None:
    pool = BlockPool(3)
    cached(pool, "a", "b", "c")
    assert pool.allocate(1) is not None
    assert len(pool.match([name("a"), name("b"), name("c")])) == 2
    assert pool.allocate(1) is not None
    assert len(pool.match([name("a"), name("b")])) == 1


def test_a_held_block_is_not_evicted() -> None:
    pool = BlockPool(2)
    blocks = cached(pool, "a", "b")
    pool.hold(blocks[:1])
    assert pool.allocate(2) is None
    assert pool.allocate(1) == [blocks[1]]


def test_the_first_block_of_a_hash_stays_the_one_found() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2) or []
    pool.cache(first, name("a"))
    pool.cache(second, name("a"))
    pool.release([first, second])
    assert pool.match([name("a")]) == [first]


def test_changes_are_net() -> None:
    pool = BlockPool(1)
    cached(pool, "a")
    assert pool.allocate(1) == [0]
    assert pool.moves.take() == type(pool.moves.take())((), ())
    pool.release([0])
    cached(pool, "b")
    assert pool.moves.take().stored == (name("b"),)
    pool.allocate(1)
    assert pool.moves.take().evicted == (name("b"),)


def test_a_quarantined_block_cannot_be_had_until_its_quarantine_ends() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2) or []
    pool.quarantine(blocks[:1])
    pool.release(blocks[1:])
    assert (pool.num_free, pool.num_used, pool.num_quarantined) == (1, 0, 1)
    assert pool.allocate(2) is None
    with pytest.raises(InvariantBroken):
        pool.hold(blocks[:1])
    pool.end_quarantine(blocks[:1])
    assert sorted(pool.allocate(2) or []) == [0, 1]


@pytest.mark.parametrize(
    "wrong", ["free twice", "free what is free", "end none", "lock shared", "lock cached", "cache free"]
)
def test_what_must_not_happen_is_a_bug(wrong: str) -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1) or []
    with pytest.raises(InvariantBroken):
        match wrong:
            case "free twice":
                pool.release([block])
                pool.release([block])
            case "free what is free":
                pool.release([1])
            case "end none":
                pool.end_quarantine([block])
            case "lock shared":
                pool.hold([block])
                pool.quarantine([block])
            case "lock cached":
                pool.cache(block, name("a"))
                pool.quarantine([block])
            case "cache free":
                pool.cache(1, name("a"))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_no_block_is_lost_or_shared_in_any_walk(seed: int) -> None:
    rng, pool = random.Random(seed), BlockPool(12)
    tables: list[list[int]] = []
    locked: list[list[int]] = []
    for number in range(60):
        match rng.randrange(5):
            case 0 | 1:
                hashes = [name(f"{rng.randrange(4)}/{depth}") for depth in range(rng.randrange(4))]
                taken = pool.acquire(hashes, rng.randrange(1, 5))
                if taken is not None:
                    hits, fresh = taken
                    assert not set(fresh) & {block for table in tables + locked for block in table}
                    tables.append(hits + fresh)
                    for block, block_hash in zip(hits + fresh, hashes, strict=False):
                        pool.cache(block, block_hash)
            case 2 if tables:
                pool.release(tables.pop(rng.randrange(len(tables))))
            case 3:
                blocks = pool.allocate(rng.randrange(1, 3))
                if blocks is not None:
                    pool.quarantine(blocks)
                    locked.append(blocks)
            case 4 if locked:
                pool.end_quarantine(locked.pop(rng.randrange(len(locked))))
        pool.check()
        assert pool.num_quarantined == sum(len(blocks) for blocks in locked), number
    for table in tables:
        pool.release(table)
    for blocks in locked:
        pool.end_quarantine(blocks)
    assert pool.num_free == 12
