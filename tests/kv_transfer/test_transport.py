"""What every transport backend must do, run against each of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import fields, replace

import numpy as np
import pytest
from transport_ends import BOUND_S, IDENTITY, End, Ends, connect, until

from core.errors import InvariantBroken, PeerRefused, WorkerLost
from core.identity import CacheIdentity
from core.membership import WorkerRef


@pytest.fixture(params=["in-process", "nixl", "faulty in-process", "faulty nixl"])
async def ends(request: pytest.FixtureRequest) -> AsyncIterator[Ends]:
    made = Ends(request.param)
    yield made
    await made.close()


async def test_bytes_arrive_where_asked_and_nowhere_else(ends: Ends) -> None:
    source, target = await ends.pair()
    expected = target.blocks.copy()
    before = source.blocks.copy()
    moves = {3: 30, 0: 1, 31: 2, 4: 31, 5: 0}
    for source_block, target_block in moves.items():
        expected[target_block] = source.blocks[source_block]

    await source.transport.push(target.ref, list(moves), list(moves.values()), b"landed")
    await until(lambda: bool(target.notices))

    assert target.notices == [(source.ref, b"landed")]
    assert np.array_equal(target.blocks, expected)
    assert np.array_equal(source.blocks, before)


async def test_a_block_of_two_ranks_moves_in_both_its_parts(ends: Ends) -> None:
    source = ends.make("prefill-0", num_runs=2)
    target = ends.make("decode-0", fill=255, num_blocks=16, num_runs=2)
    for rank, run in enumerate(source.runs):
        run[:] = np.arange(100 * rank, 100 * rank + len(run), dtype=np.uint8)[:, None]
    await connect(source, target)
    await source.transport.push(target.ref, [31, 4, 0], [0, 15, 3], b"")
    await until(lambda: bool(target.notices))
    for rank, run in enumerate(target.runs):
        first_bytes = {0: 31 + 100 * rank, 15: 4 + 100 * rank, 3: 100 * rank}
        expected = np.array([first_bytes.get(block, 255) for block in range(16)], dtype=np.uint8)
        assert (run == expected[:, None]).all()


async def test_peers_of_one_rank_and_of_two_are_refused_by_name(ends: Ends) -> None:
    """Both ways to tell: what the identity says, and what the memory is, which must be true to it."""
    source, target, two = ends.make("prefill-0"), ends.make("decode-0"), ends.make("decode-1", num_runs=2)
    differing = replace(IDENTITY, tensor_parallel_size=2)
    for end, difference, field in ((two, {"identity": differing}, "tensor_parallel_size"), (two, {}, "base_addresses")):
        with pytest.raises(PeerRefused) as refused:
            await connect(source, end, **difference)
        assert refused.value.field == field
    await connect(source, target)


async def test_connecting_writes_no_page(ends: Ends) -> None:
    source, target = ends.make("prefill-0", fill=7), ends.make("decode-0", fill=9)
    link = await source.transport.connect(target.transport.describe())
    await connect(target, source)
    assert link.peer == target.ref
    assert (source.blocks == 7).all()
    assert (target.blocks == 9).all()
    assert not source.notices and not target.notices


async def test_a_notice_comes_after_its_bytes(ends: Ends) -> None:
    source, target = await ends.pair()
    seen: dict[int, bool] = {}

    def look(notice: bytes) -> None:
        block = notice[0]
        seen[block] = bool((target.blocks[block] == source.blocks[block]).all())

    target.on_notice = look
    await asyncio.gather(*(source.transport.push(target.ref, [i], [i], bytes([i])) for i in range(32)))
    await until(lambda: len(seen) == 32)
    assert all(seen.values())


async def test_notices_of_one_sender_keep_their_order(ends: Ends) -> None:
    source, target = await ends.pair()
    for number in range(50):
        await source.transport.push(target.ref, [number % 32], [number % 32], b"%d" % number)
    await until(lambda: len(target.notices) == 50)
    assert [notice for _, notice in target.notices] == [b"%d" % number for number in range(50)]


async def test_an_empty_push_is_a_notice(ends: Ends) -> None:
    source, target = await ends.pair()
    await source.transport.push(target.ref, [], [], b"nothing")
    await source.transport.notify(target.ref, b"alone")
    await source.transport.notify(target.ref, b"")
    await source.transport.push(target.ref, [1], [1], b"")
    await until(lambda: len(target.notices) == 4)
    assert [notice for _, notice in target.notices] == [b"nothing", b"alone", b"", b""]
    assert (target.blocks[0] == 255).all()


async def test_large_notices(ends: Ends) -> None:
    source, target = await ends.pair()
    notice = bytes(range(256)) * 400  # 100 KB
    await source.transport.push(target.ref, [1], [2], notice)
    await source.transport.notify(target.ref, notice[::-1])
    await until(lambda: len(target.notices) == 2)
    assert target.notices == [(source.ref, notice), (source.ref, notice[::-1])]


@pytest.mark.parametrize(
    ("source_blocks", "target_blocks"),
    [([0, 1], [0]), ([], [0]), ([32], [0]), ([0], [32]), ([-1], [0]), ([0], [-1]), ([0, 99], [0, 1])],
)
async def test_wrong_block_lists_are_refused(ends: Ends, source_blocks: list[int], target_blocks: list[int]) -> None:
    source, target = await ends.pair()
    with pytest.raises(InvariantBroken):
        await source.transport.push(target.ref, source_blocks, target_blocks, b"wrong")
    await source.transport.push(target.ref, [31], [31], b"right")
    await until(lambda: bool(target.notices))
    assert [notice for _, notice in target.notices] == [b"right"]
    assert (target.blocks[:31] == 255).all()


async def test_ids_are_checked_against_the_pool_they_are_for(ends: Ends) -> None:
    small, large = ends.make("prefill-0", num_blocks=4), ends.make("decode-0", num_blocks=8)
    await connect(small, large)
    await connect(large, small)
    await small.transport.push(large.ref, [3], [7], b"fits")
    await large.transport.push(small.ref, [7], [3], b"fits")
    with pytest.raises(InvariantBroken, match="source block 4"):
        await small.transport.push(large.ref, [4], [4], b"")
    with pytest.raises(InvariantBroken, match="target block 4"):
        await large.transport.push(small.ref, [4], [4], b"")


@pytest.mark.parametrize("name", [item.name for item in fields(CacheIdentity)])
async def test_another_identity_is_refused_by_name(ends: Ends, name: str) -> None:
    source, target = ends.make("prefill-0"), ends.make("decode-0")
    ours = getattr(IDENTITY, name)
    differing = replace(IDENTITY, **{name: ours + 1 if isinstance(ours, int) else ours + "x"})
    with pytest.raises(PeerRefused) as refused:
        await connect(source, target, identity=differing)
    assert refused.value.field == name
    with pytest.raises(WorkerLost):
        await source.transport.push(target.ref, [0], [0], b"")
    await connect(source, target)


@pytest.mark.parametrize("name", ["transport", "transport_version", "block_bytes", "memory_kind"])
async def test_another_backend_version_or_block_is_refused_by_name(ends: Ends, name: str) -> None:
    source, target = ends.make("prefill-0"), ends.make("decode-0")
    value = 8192 if name == "block_bytes" else "other"
    with pytest.raises(PeerRefused) as refused:
        await connect(source, target, **{name: value})
    assert refused.value.field == name
    await connect(source, target)


async def test_connecting_to_oneself_is_refused(ends: Ends) -> None:
    source = ends.make("prefill-0")
    with pytest.raises(PeerRefused) as refused:
        await connect(source, source)
    assert refused.value.field == "ref"


async def test_connect_is_idempotent(ends: Ends) -> None:
    source, target = ends.make("prefill-0"), ends.make("decode-0")
    links = await asyncio.gather(*(source.transport.connect(target.transport.describe()) for _ in range(3)))
    links.append(await source.transport.connect(target.transport.describe()))
    assert len(set(links)) == 1
    await source.transport.push(target.ref, [0], [0], b"once")
    await until(lambda: bool(target.notices))
    assert target.notices == [(source.ref, b"once")]


async def test_two_workers_connect_to_each_other_at_once(ends: Ends) -> None:
    source, target = ends.make("prefill-0"), ends.make("decode-0")
    async with asyncio.timeout(BOUND_S):
        await asyncio.gather(connect(source, target), connect(target, source))
    await asyncio.gather(
        source.transport.push(target.ref, [0], [0], b"there"), target.transport.push(source.ref, [1], [1], b"back")
    )
    await until(lambda: bool(target.notices and source.notices))


async def test_one_way_is_enough_to_push(ends: Ends) -> None:
    source, target = ends.make("prefill-0", fill=5), ends.make("decode-0")
    await connect(source, target)
    await source.transport.push(target.ref, [0], [1], b"hello")
    await until(lambda: bool(target.notices))
    assert target.notices == [(source.ref, b"hello")]
    assert (target.blocks[1] == 5).all()
    with pytest.raises(WorkerLost):
        await target.transport.notify(source.ref, b"not connected that way")


async def test_a_peer_that_dropped_us_still_gets_what_we_push(ends: Ends) -> None:
    source, target = await ends.pair()
    await target.transport.drop(source.ref)
    await source.transport.push(target.ref, [3], [4], b"still")
    await until(lambda: bool(target.notices))
    assert (target.blocks[4] == source.blocks[3]).all()
    with pytest.raises(WorkerLost):
        await target.transport.notify(source.ref, b"dropped")
    assert not source.lost and not target.lost


async def test_unknown_peers(ends: Ends) -> None:
    source, stranger = ends.make("prefill-0"), WorkerRef("decode-9", "none")
    with pytest.raises(WorkerLost) as lost:
        await source.transport.push(stranger, [0], [0], b"")
    assert lost.value.worker_id == "decode-9"
    with pytest.raises(WorkerLost):
        await source.transport.notify(stranger, b"")
    await source.transport.drop(stranger)
    assert not source.lost


async def test_a_closed_peer_is_lost_once(ends: Ends) -> None:
    source, target = await ends.pair()
    await source.transport.push(target.ref, [0], [0], b"alive")
    await target.transport.close()
    async with asyncio.timeout(BOUND_S):
        outcomes = await asyncio.gather(
            *(source.transport.push(target.ref, [0], [0], b"dead") for _ in range(5)), return_exceptions=True
        )
    assert [type(outcome) for outcome in outcomes] == [WorkerLost] * 5
    await until(lambda: bool(source.lost))
    with pytest.raises(WorkerLost):
        await source.transport.notify(target.ref, b"still dead")
    await source.transport.drop(target.ref)
    assert source.lost == [target.ref]
    late = ends.make("prefill-1", connect_timeout_s=0.2)
    with pytest.raises(WorkerLost):
        await connect(late, target)


async def test_many_pushes_at_once(ends: Ends) -> None:
    source, target = await ends.pair()
    third = ends.make("prefill-1", fill=77)
    await connect(third, target)

    def push(end: End, number: int) -> asyncio.Task[None]:
        return asyncio.create_task(end.transport.push(target.ref, [number % 16], [number % 32], b"%d" % number))

    tasks = [push(source if number % 2 else third, number) for number in range(64)]
    async with asyncio.timeout(BOUND_S):
        await asyncio.gather(*tasks)
    await until(lambda: len(target.notices) == 64)
    for block in range(32):
        assert (target.blocks[block] == (source.blocks[block % 16] if block % 2 else 77)).all()
    assert source.transport.stats().in_flight == 0


async def test_both_directions_at_once(ends: Ends) -> None:
    left, right = await ends.pair()
    left.blocks[16:], right.blocks[:16] = 50, 60
    sends = [left.transport.push(right.ref, [i], [i], b"") for i in range(16, 32)]
    sends += [right.transport.push(left.ref, [i], [i], b"") for i in range(16)]
    async with asyncio.timeout(BOUND_S):
        await asyncio.gather(*sends)
    await until(lambda: len(left.notices) == 16 and len(right.notices) == 16)
    for end in (left, right):
        assert (end.blocks[:16] == 60).all()
        assert (end.blocks[16:] == 50).all()


async def test_a_cancelled_push_still_lands(ends: Ends) -> None:
    source, target = await ends.pair()
    task = asyncio.create_task(source.transport.push(target.ref, [2], [2], b"anyway"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: bool(target.notices))
    assert (target.blocks[2] == source.blocks[2]).all()


async def test_drop_and_a_new_incarnation(ends: Ends) -> None:
    source, target = await ends.pair()
    await source.transport.push(target.ref, [0], [0], b"old life")
    await source.transport.drop(target.ref)
    with pytest.raises(WorkerLost):
        await source.transport.push(target.ref, [0], [0], b"dropped")
    await target.transport.close()

    reborn = ends.make("decode-0", fill=200)
    await connect(source, reborn)
    await source.transport.push(reborn.ref, [1], [1], b"new life")
    await until(lambda: bool(reborn.notices))
    assert (reborn.blocks[1] == source.blocks[1]).all()
    assert reborn.ref.worker_id == target.ref.worker_id
    assert not source.lost


async def test_drop_and_connect_again(ends: Ends) -> None:
    source, target = await ends.pair()
    for number in range(3):
        await source.transport.drop(target.ref)
        await connect(source, target)
        await source.transport.push(target.ref, [number], [number], b"again")
    await until(lambda: len(target.notices) == 3)


async def test_close_twice(ends: Ends) -> None:
    source, target = await ends.pair()
    await asyncio.gather(source.transport.close(), source.transport.close())
    await source.transport.close()
    await source.transport.drop(target.ref)
    for call in (source.transport.push(target.ref, [0], [0], b""), source.transport.notify(target.ref, b"")):
        with pytest.raises(WorkerLost):
            await call
    with pytest.raises(WorkerLost):
        await connect(source, target)
