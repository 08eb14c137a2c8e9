"""The faults that the in-process transport can be asked for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from transport_ends import BOUND_S, Ends, connect, until

from core.errors import InvariantBroken, TransferFailed, WorkerLost
from kv_transfer.pool import MemoryPool
from tests.kv_transfer.in_process import InProcessTransport


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    made = Ends("in-process")
    yield made
    await made.close()


async def test_a_frozen_worker_gets_everything_on_thaw_in_order(ends: Ends) -> None:
    source, target = await ends.pair()
    ends.network.freeze(target.ref)
    pushes = [asyncio.create_task(source.transport.push(target.ref, [i], [i], b"%d" % i)) for i in range(5)]
    assert not (await asyncio.wait(pushes, timeout=0.05))[0]
    await source.transport.notify(target.ref, b"alone")  # a notice is not waited for
    assert (target.blocks == 255).all()
    assert source.transport.stats().in_flight == 6  # type: ignore[attr-defined]

    ends.network.thaw(target.ref)
    async with asyncio.timeout(BOUND_S):
        await asyncio.gather(*pushes)
    await until(lambda: len(target.notices) == 6)
    assert [notice for _, notice in target.notices] == [b"0", b"1", b"2", b"3", b"4", b"alone"]


async def test_a_cancelled_push_to_a_frozen_worker_still_writes(ends: Ends) -> None:
    source, target = await ends.pair()
    ends.network.freeze(target.ref)
    push = asyncio.create_task(source.transport.push(target.ref, [7], [7], b"late"))
    await asyncio.sleep(0)
    push.cancel()
    await asyncio.wait([push])
    ends.network.thaw(target.ref)
    await until(lambda: bool(target.notices))
    assert (target.blocks[7] == source.blocks[7]).all()


async def test_a_frozen_worker_cannot_be_dropped_until_it_thaws(ends: Ends) -> None:
    source, target = await ends.pair()
    ends.network.freeze(target.ref)
    push = asyncio.create_task(source.transport.push(target.ref, [0], [0], b""))
    await asyncio.sleep(0)
    with pytest.raises(TransferFailed):
        await source.transport.drop(target.ref)
    assert source.transport.stats().zombies == 1  # type: ignore[attr-defined]
    with pytest.raises(WorkerLost):
        await connect(source, target)
    ends.network.thaw(target.ref)
    await push
    await source.transport.drop(target.ref)
    await connect(source, target)
    await source.transport.push(target.ref, [1], [1], b"again")


async def test_a_killed_worker_fails_what_is_in_flight_and_what_comes(ends: Ends) -> None:
    source, target = await ends.pair()
    await source.transport.push(target.ref, [0], [0], b"alive")
    ends.network.freeze(target.ref)
    pushes = [asyncio.create_task(source.transport.push(target.ref, [1], [1], b"")) for _ in range(3)]
    await asyncio.sleep(0)
    ends.network.kill(target.ref)
    outcomes = await asyncio.gather(*pushes, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [WorkerLost] * 3
    with pytest.raises(WorkerLost):
        await source.transport.notify(target.ref, b"")
    assert source.lost == [target.ref]
    assert (target.blocks[1] == 255).all()


async def test_a_killed_idle_worker_is_noticed_by_the_next_operation(ends: Ends) -> None:
    source, target = await ends.pair()
    ends.network.kill(target.ref)
    assert not source.lost
    with pytest.raises(WorkerLost):
        await source.transport.notify(target.ref, b"")
    assert source.lost == [target.ref]


async def test_delay_holds_the_bytes_back_and_keeps_the_order(ends: Ends) -> None:
    source, target = await ends.pair()
    ends.network.delay_s = 0.02
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    pushes = [asyncio.create_task(source.transport.push(target.ref, [i], [i], b"%d" % i)) for i in range(9)]
    await asyncio.sleep(0)
    assert not target.notices
    await asyncio.gather(*pushes)
    assert loop.time() - started_s >= 0.02
    assert [notice for _, notice in target.notices] == [b"%d" % i for i in range(9)]


async def test_an_incarnation_is_used_once(ends: Ends) -> None:
    source = ends.make("prefill-0")
    identity = source.transport.describe().identity
    with pytest.raises(InvariantBroken):
        InProcessTransport(ends.network, source.ref, identity, MemoryPool((0,), 0, 1))
