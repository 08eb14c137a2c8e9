"""Two drivers over the in-process backend: what they do with bytes that did not arrive whole, and what they report."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import numpy as np
import pytest
from transport_ends import End, Ends, until

from core.errors import InvariantBroken
from engine.block_pool import BlockPool
from kv_transfer.checksum import BlockChecksums
from kv_transfer.credit import PushCredit
from kv_transfer.driver import HandoffDriver, HandoffOutcome, PushReport
from kv_transfer.effects import LeaseConfig, LoadFailurePolicy, SourceEnded, TargetFailed, TargetLanded
from kv_transfer.faults import FaultyTransport, TransportFaults
from kv_transfer.pace import TransferPace
from kv_transfer.pool import MemoryPool
from kv_transfer.session import HandoffSessions

NUM_BLOCKS, BLOCK_BYTES = 32, 4096


@dataclass
class Side:
    end: End
    pool: BlockPool
    sessions: HandoffSessions
    driver: HandoffDriver
    outcomes: list[HandoffOutcome]
    pushes: list[PushReport] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    landed_s: list[float] = field(default_factory=list)


def make_side(ends: Ends, worker_id: str, policy: LoadFailurePolicy, checks: bool) -> Side:
    end = ends.make(worker_id, listens=False)
    for block in range(NUM_BLOCKS):
        end.blocks[block] = block + 1
    pool, pace = BlockPool(NUM_BLOCKS), TransferPace(BLOCK_BYTES)
    sessions = HandoffSessions(end.ref, pool, LeaseConfig(), pool.match, pace.bound_s, policy)
    outcomes: list[HandoffOutcome] = []

    def broken(error: BaseException) -> None:
        raise error

    checksums = BlockChecksums(MemoryPool((end.blocks.ctypes.data,), NUM_BLOCKS, BLOCK_BYTES)) if checks else None
    credit = PushCredit(BLOCK_BYTES, 4 * BLOCK_BYTES)
    driver = HandoffDriver(end.transport, sessions, time.monotonic, outcomes.append, broken, credit, pace, checksums)
    side = Side(end, pool, sessions, driver, outcomes)
    driver.listener.pushed = side.pushes.append
    driver.listener.landed = side.landed_s.append
    driver.listener.verified = lambda _duration_s, whole: side.whole.append(whole)
    return side


async def hand_off(
    policy: LoadFailurePolicy = LoadFailurePolicy.RECOMPUTE, *, checks: bool = True, corrupt: bool = False,
    prefix: bool = False,
) -> tuple[Side, Side]:  # fmt: skip
    """Six blocks in two pushes, the second perhaps with a corrupt block; returns when both sides have ended."""
    ends = Ends("faulty in-process")
    source, target = (make_side(ends, name, policy, checks) for name in ("prefill-0", "decode-0"))
    await source.driver.connect(target.end.transport.describe())
    await target.driver.connect(source.end.transport.describe())
    pages = target.pool.allocate(6)
    table = source.pool.allocate(6)
    assert pages and table
    ticket = target.sessions.target.reserve("h", source.end.ref, 2, tuple(pages[:6]), 0.0, may_be_short=prefix)
    whole_table = [table[0], table[0], *table]  # the two blocks that the target had are not pushed
    now = time.monotonic()
    source.driver.perform(source.sessions.source.open(ticket, now))
    source.driver.perform(source.sessions.source.blocks_ready("h", whole_table, 5, now, last=False))
    await until(lambda: len(source.pushes) == 1)
    if corrupt:
        assert isinstance(source.end.transport, FaultyTransport)
        source.end.transport.inject(TransportFaults(corrupt_block=1.0))
    ready = source.sessions.source.blocks_ready("h", whole_table, 8, now, last=True, first_tokens=(7,))
    source.driver.perform(ready)
    await until(lambda: bool(source.outcomes and target.outcomes))
    source.pool.release(table)
    assert source.pool.num_free == NUM_BLOCKS
    target.pool.check()
    return source, target


async def test_whole_blocks_land_whole_and_are_reported() -> None:
    source, target = await hand_off()
    [landed] = target.outcomes
    assert isinstance(landed, TargetLanded) and landed.num_intact == len(landed.blocks) == 6
    assert source.outcomes == [SourceEnded("h", landed=True)]
    assert target.whole == [True, True]
    assert [push.num_blocks for push in source.pushes] == [3, 3]
    assert source.pushes[0].exposed_s == 0.0 < source.pushes[1].exposed_s <= source.pushes[1].push_s + 1.0
    assert len(source.landed_s) == 1


async def test_a_corrupt_block_ends_what_landed_whole() -> None:
    _, target = await hand_off(corrupt=True)
    [landed] = target.outcomes
    assert isinstance(landed, TargetLanded)
    assert len(landed.blocks) == 6 and 3 <= landed.num_intact < 6
    assert target.whole == [True, False]
    target.pool.release(landed.blocks)
    assert target.pool.num_free == NUM_BLOCKS


async def test_a_corrupt_prefix_is_shortened() -> None:
    _, target = await hand_off(corrupt=True, prefix=True)
    [landed] = target.outcomes
    assert isinstance(landed, TargetLanded)
    assert 3 <= len(landed.blocks) == landed.num_intact < 6
    target.pool.release(landed.blocks)
    assert target.pool.num_free == NUM_BLOCKS


async def test_a_corrupt_block_fails_the_handoff_where_that_is_the_policy() -> None:
    _, target = await hand_off(LoadFailurePolicy.FAIL, corrupt=True)
    [failed] = target.outcomes
    assert isinstance(failed, TargetFailed) and "did not arrive whole" in failed.reason
    assert target.pool.num_free == NUM_BLOCKS


async def test_without_checksums_a_corrupt_block_passes() -> None:
    """The control: it is the checksums that find it, nothing else."""
    _, target = await hand_off(checks=False, corrupt=True)
    [landed] = target.outcomes
    assert isinstance(landed, TargetLanded) and landed.num_intact == 6
    assert not target.whole


async def test_a_push_that_waits_for_a_stopped_handoff_is_not_sent() -> None:
    ends = Ends("in-process")
    source, target = (make_side(ends, name, LoadFailurePolicy.FAIL, True) for name in ("prefill-0", "decode-0"))
    await source.driver.connect(target.end.transport.describe())
    pages, table = target.pool.allocate(8), source.pool.allocate(8)
    assert pages and table
    ticket = target.sessions.target.reserve("h", source.end.ref, 0, tuple(pages), 0.0)
    source.driver.perform(source.sessions.source.open(ticket, 0.0))
    ends.network.freeze(target.end.ref)
    source.driver.perform(source.sessions.source.blocks_ready("h", table, 4, 0.0, last=False))
    source.driver.perform(source.sessions.source.blocks_ready("h", table, 8, 0.0, last=True))
    await asyncio.sleep(0.05)
    source.driver.perform(source.sessions.source.cancel("h"))
    ends.network.thaw(target.end.ref)
    await until(lambda: bool(source.outcomes))
    assert [push.delivered for push in source.pushes] == [True, False]
    assert (target.end.blocks[pages[4:]] == [[page + 1] for page in pages[4:]]).all()
    source.pool.release(table)
    assert source.pool.num_free == NUM_BLOCKS


def test_device_memory_is_not_read() -> None:
    with pytest.raises(InvariantBroken):
        BlockChecksums(MemoryPool((1 << 20,), 1, 4096, memory_kind="VRAM"))


def test_a_checksum_is_of_all_parts_of_a_block() -> None:
    runs = [np.arange(4 * 64, dtype=np.uint8).reshape(4, 64) for _ in range(2)]
    addresses = tuple(run.ctypes.data for run in runs)
    checksums = BlockChecksums(MemoryPool(addresses, 4, 128, device_ids=(0, 0)))
    told = checksums.of([2, 1, 3])
    assert checksums.num_intact([2, 1, 3], told) == 3
    runs[1][1, 63] ^= 1
    assert checksums.num_intact([2, 1, 3], told) == 1
