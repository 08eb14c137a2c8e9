"""Each fault of the wrapper alone, over the in-process backend, on the test's own time."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from dataclasses import fields

import numpy as np
import pytest
from transport_ends import End, Ends, connect

from core.errors import BadRequest, TransferFailed, WorkerLost
from kv_transfer.faults import FaultyTransport, TransportFaults


class Clock:
    """`later` that waits for `pass_time`."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._now = 0.0

    def later(self, delay_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self._now + delay_s, next(self._order), what))

    def pass_time(self, seconds: float) -> None:
        self._now += seconds
        while self._due and self._due[0][0] <= self._now:
            heapq.heappop(self._due)[2]()


async def faulty_pair(clock: Clock, **faults: float) -> tuple[End, End, FaultyTransport, FaultyTransport]:
    """(source, target) and their wrappers, connected both ways; faults begin after that."""
    source, target = await Ends("faulty in-process").pair()
    wrappers = []
    for end in (source, target):
        assert isinstance(end.transport, FaultyTransport)
        end.transport._later = clock.later
        end.transport.inject(TransportFaults(**faults))  # type: ignore[arg-type]
        wrappers.append(end.transport)
    return source, target, wrappers[0], wrappers[1]


async def send(source: End, target: End, numbers: range) -> None:
    for number in numbers:
        await source.transport.push(target.ref, [number % 32], [number % 32], b"%d" % number)
    await asyncio.sleep(0)


def heard(end: End) -> list[int]:
    return [int(notice) for _, notice in end.notices]


async def test_notices_are_lost_doubled_and_late_and_their_bytes_are_not() -> None:
    clock = Clock()
    source, target, _, wrapper = await faulty_pair(
        clock, lose_notice=0.2, double_notice=0.2, late_notice=0.3, late_s=5.0, seed=3
    )
    await send(source, target, range(100))
    assert np.array_equal(source.blocks, target.blocks)
    at_once = heard(target)
    assert sorted(at_once) == at_once
    clock.pass_time(5.0)
    assert len(heard(target)) > len(at_once)
    assert sorted(heard(target)) != heard(target)  # overtaken
    assert 60 < len(set(heard(target))) < 95  # lost
    assert len(heard(target)) > len(set(heard(target)))  # doubled

    wrapper.inject(TransportFaults())
    target.notices.clear()
    await send(source, target, range(100))
    assert heard(target) == list(range(100))


async def test_one_seed_is_one_sequence() -> None:
    async def run(seed: int) -> list[int]:
        clock = Clock()
        source, target, _, _ = await faulty_pair(clock, lose_notice=0.3, double_notice=0.3, seed=seed)
        await send(source, target, range(50))
        return heard(target)

    assert await run(1) == await run(1) != await run(2)


async def test_a_push_that_fails_moves_nothing() -> None:
    source, target, wrapper, _ = await faulty_pair(Clock(), fail_push=1.0)
    with pytest.raises(TransferFailed):
        await source.transport.push(target.ref, [1], [1], b"1")
    assert (target.blocks == 255).all() and not target.notices and not source.lost
    wrapper.inject(TransportFaults())
    await send(source, target, range(1))
    assert heard(target) == [0]


async def test_a_late_push_writes_later_also_when_nobody_waits_for_it() -> None:
    clock = Clock()
    source, target, _, _ = await faulty_pair(clock, late_push=1.0, late_s=5.0)
    push = asyncio.ensure_future(source.transport.push(target.ref, [1], [1], b"1"))
    await asyncio.sleep(0.01)
    push.cancel()
    assert (target.blocks == 255).all()
    clock.pass_time(5.0)
    await asyncio.sleep(0.01)
    assert (target.blocks[1] == source.blocks[1]).all()
    assert heard(target) == [1]


async def test_a_late_push_from_before_a_drop_is_never_sent() -> None:
    clock = Clock()
    source, target, _, _ = await faulty_pair(clock, late_push=1.0, late_s=5.0)
    push = asyncio.ensure_future(source.transport.push(target.ref, [1], [1], b"1"))
    await asyncio.sleep(0.01)
    await source.transport.drop(target.ref)
    await connect(source, target)
    clock.pass_time(5.0)
    with pytest.raises(WorkerLost):
        await push
    assert (target.blocks == 255).all()


async def test_one_block_of_a_push_is_corrupt() -> None:
    source, target, _, _ = await faulty_pair(Clock(), corrupt_block=1.0)
    await source.transport.push(target.ref, [3, 4, 5], [3, 4, 5], b"1")
    wrong = [block for block in (3, 4, 5) if not (target.blocks[block] == source.blocks[block]).all()]
    assert len(wrong) == 1
    assert (target.blocks[6:] == 255).all()


async def test_a_broken_path_is_told_and_can_be_mended() -> None:
    source, target, wrapper, _ = await faulty_pair(Clock(), break_path=1.0)
    with pytest.raises(WorkerLost):
        await source.transport.push(target.ref, [1], [1], b"1")
    assert source.lost == [target.ref]
    wrapper.inject(TransportFaults())
    await connect(source, target)
    await send(source, target, range(3))
    assert heard(target) == [0, 1, 2]


def test_the_setting_names_what_is_wrong_with_it() -> None:
    assert TransportFaults.parse("lose_notice=0.5, late_s=2,seed=9") == TransportFaults(
        lose_notice=0.5, late_s=2.0, seed=9
    )
    for text, named in (("lose=1", "lose"), ("lose_notice=2", "lose_notice"), ("seed=x", "seed"), ("", "''")):
        with pytest.raises(BadRequest, match=named) as refused:
            TransportFaults.parse(text)
        assert refused.value.field == "kv_faults"
    chances = {item.name for item in fields(TransportFaults)} - {"late_s", "seed"}
    assert all(getattr(TransportFaults(), name) == 0.0 for name in chances)
