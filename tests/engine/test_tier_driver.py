"""Real bytes: a runner's blocks in host memory and in a file, through the engine's loop and the disk's thread."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from core.blocks import CacheTier
from core.identity import BlockHash
from core.request import GenerateRequest, SamplingParams, StopConditions
from engine.block_pool import BlockPool
from engine.cache_tiers import CacheTiers
from engine.disk_slots import DiskSlots
from engine.host_slots import HostSlots
from engine.loop import EngineLoop
from engine.scheduler import Scheduler
from engine.scheduler_config import SchedulerConfig
from engine.sequence import ModelLimits
from engine.step import Progress
from engine.tier_driver import TierDriver
from engine.torch_runner import TorchModelRunner

NUM_BLOCKS = 22
NUM_PROMPTS = 6


class Engine:
    """A worker's engine with or without tiers; all it is asked for is done in turn or together."""

    def __init__(self, folder: Path, disk_folder: Path, num_host_slots: int, num_disk_slots: int) -> None:
        runner = TorchModelRunner.load(folder, "float32", NUM_BLOCKS)
        self.tiers = None
        if num_host_slots:
            self.host = HostSlots(runner.kv_pools, num_host_slots)
            self.tiers = CacheTiers(self.host, num_host_slots, num_disk_slots)
        self.pool = BlockPool(NUM_BLOCKS, self.tiers)
        limits = ModelLimits(16, runner.max_context_tokens, ())
        self.scheduler = Scheduler(SchedulerConfig(64, growth_blocks=0), self.pool, limits, b"d", lambda _request: None)
        self.loop = EngineLoop(self.scheduler, runner, self.stepped)
        self.disk = self.driver = None
        if num_disk_slots:
            self.disk = DiskSlots(disk_folder, num_disk_slots, self.host.slot_bytes)
            self.driver = TierDriver(self.tiers, self.host, self.disk, self.loop.wake, timeout_s=0.5)
        self.outputs: defaultdict[str, list[int]] = defaultdict(list)
        self.ended: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    def stepped(self, progress: list[Progress], _report: object) -> None:
        for item in progress:
            for delta in item.deltas:
                self.outputs[item.request_id] += delta.token_ids
            if item.ended:
                self.ended[item.request_id].set()

    async def __aenter__(self) -> Engine:
        self.tasks = [item.start() for item in (self.loop, self.driver) if item is not None]
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.loop.stop()
        if self.driver is not None:
            await self.driver.stop()
        for task in self.tasks:
            if not task.cancelled():
                task.result()

    async def say(self, requests: Iterable[GenerateRequest]) -> None:
        """All together."""
        wanted = list(requests)
        for item in wanted:
            self.scheduler.add(self.scheduler.new_sequence(item))
        self.loop.wake()
        async with asyncio.timeout(60):
            for item in wanted:
                await self.ended[item.request_id].wait()
        assert self.pool.num_used == 0
        self.pool.check()


def prompts() -> list[tuple[int, ...]]:
    """Together three times what the pool holds; some begin alike."""
    rng = random.Random(3)
    shared = tuple(rng.randrange(3, 250) for _ in range(64))
    return [(*shared[: 32 * (n % 3)], *(rng.randrange(3, 250) for _ in range(130))) for n in range(NUM_PROMPTS)]


def rounds() -> list[list[GenerateRequest]]:
    """Each prompt alone, then all again, two at a time: pools too small for both preempt."""
    stop, found = StopConditions(20), []
    for turn, size in enumerate((1, 1, 2)):
        all_of_them = [
            GenerateRequest(f"{turn}/{number}", prompt, SAMPLING[number % 2], stop)
            for number, prompt in enumerate(prompts())
        ]
        found += [all_of_them[start : start + size] for start in range(0, NUM_PROMPTS, size)]
    return found


SAMPLING = (SamplingParams(0.0), SamplingParams(1.0, seed=3))


async def outputs_of(engine: Engine) -> dict[str, list[int]]:
    async with engine:
        for requests in rounds():
            await engine.say(requests)
    return dict(engine.outputs)


@pytest.fixture(scope="module")
def expected(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    engine = Engine(tiny_folder, tmp_path_factory.mktemp("none"), 0, 0)
    found = asyncio.run(outputs_of(engine))
    assert engine.pool.hit_blocks[CacheTier.DEVICE] < 60
    return found


@pytest.mark.parametrize(("host", "disk", "used"), [(80, 0, "host"), (30, 80, "disk")])
async def test_tokens_are_equal_with_and_without_tiers(
    tiny_folder: Path, tmp_path: Path, expected: dict[str, list[int]], host: int, disk: int, used: str
) -> None:
    engine = Engine(tiny_folder, tmp_path, host, disk)
    assert await outputs_of(engine) == expected
    assert engine.pool.hit_blocks[CacheTier(used)] > 10
    assert engine.scheduler.num_preemptions > 0
    assert engine.tiers is not None and engine.tiers.num_damaged == 0


async def test_a_damaged_file_costs_hits_and_no_token(
    tiny_folder: Path, tmp_path: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    damage_writes(monkeypatch)
    engine = Engine(tiny_folder, tmp_path, 30, 80)
    assert await outputs_of(engine) == expected
    assert engine.tiers is not None and engine.tiers.num_damaged > 5


async def test_without_its_checksum_the_damage_is_said(
    tiny_folder: Path, tmp_path: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above: the same damage is believed."""
    damage_writes(monkeypatch)
    read = DiskSlots.read
    monkeypatch.setattr(DiskSlots, "read", lambda self, slot, data: [read(self, slot, data)] != [])
    assert await outputs_of(Engine(tiny_folder, tmp_path, 30, 80)) != expected


def damage_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other write leaves zeros in a part of its block."""
    write = DiskSlots.write

    def damage(self: DiskSlots, slot: int, data: memoryview) -> None:
        write(self, slot, data)
        if slot % 2:
            os.pwrite(self._file.fileno(), bytes(len(data) // 2), slot * len(data))

    monkeypatch.setattr(DiskSlots, "write", damage)


@pytest.mark.parametrize("trouble", ["error", "hangs"])
async def test_a_disk_that_fails_or_hangs_holds_nobody_up(
    tiny_folder: Path, tmp_path: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    go_on = threading.Event()

    def fail(self: DiskSlots, slot: int, data: memoryview) -> bool:
        if trouble == "error":
            raise OSError("the disk is broken")
        go_on.wait(20)
        data[:] = bytes(len(data))  # late: nobody may look at it any more
        return True

    monkeypatch.setattr(DiskSlots, "read", fail)
    engine = Engine(tiny_folder, tmp_path, 30, 80)
    try:
        async with engine:
            for requests in rounds():
                await engine.say(requests)
            go_on.set()
    finally:
        go_on.set()
    assert dict(engine.outputs) == expected
    assert engine.tiers is not None and engine.tiers.num_blocks(CacheTier.DISK) == 0
    assert engine.pool.hit_blocks[CacheTier.DISK] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_host_slots_hold_every_part_of_a_block(dtype: torch.dtype) -> None:
    """Of two ranks: each has a part of each block."""
    pools = [torch.randn(3, 2, 2, 4).to(dtype) for _ in range(2)]
    before = [pool.clone() for pool in pools]
    slots = HostSlots(pools, 2)
    assert slots.slot_bytes == sum(pool[0].nbytes for pool in pools)
    slots.save(2, 1)
    slots.save(0, 0)
    for pool in pools:
        pool[1] = 0
    slots.load(1, 1)
    for pool, old in zip(pools, before, strict=True):
        assert torch.equal(pool[1], old[2])
        assert torch.equal(pool[[0, 2]], old[[0, 2]])


def test_disk_slots_give_back_what_they_were_given_and_say_when_they_cannot(tmp_path: Path) -> None:
    disk = DiskSlots(tmp_path, 3, 4096)
    blocks = [random.Random(slot).randbytes(4096) for slot in range(3)]
    for slot, block in enumerate(blocks):
        disk.write(slot, memoryview(block))
    data = memoryview(bytearray(4096))
    for slot in (2, 0, 1):
        assert disk.read(slot, data)
        assert bytes(data) == blocks[slot]
    os.pwrite(disk._file.fileno(), b"x", 2 * 4096 + 7)
    assert not disk.read(2, data)
    os.ftruncate(disk._file.fileno(), 4096)
    with pytest.raises(OSError, match="0 of 4096 bytes"):
        disk.read(1, data)
    disk.close()
    assert os.listdir(tmp_path) == []


HOLD = """
import sys, time
from pathlib import Path
from engine.disk_slots import DiskSlots
disk = DiskSlots(Path(sys.argv[1]), 64, 1 << 20)
disk.write(5, memoryview(bytearray(1 << 20)))
print("open", flush=True)
time.sleep(60)
"""


def test_a_killed_worker_leaves_no_file(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        opened = [os.readlink(link) for link in Path(f"/proc/{process.pid}/fd").iterdir()]
        assert any(target.startswith(str(tmp_path)) for target in opened)  # it is there
        assert os.listdir(tmp_path) == []  # and has no name
        process.send_signal(signal.SIGKILL)
    assert os.listdir(tmp_path) == []


class FakeHost:
    """Eight slots of eight bytes."""

    slot_bytes = 8

    def __init__(self) -> None:
        self.slots = [bytearray(8) for _ in range(8)]

    def bytes_of(self, slot: int) -> memoryview:
        return memoryview(self.slots[slot])

    def save(self, block: int, slot: int) -> None: ...

    def load(self, slot: int, block: int) -> None: ...


class FakeDisk:
    """Takes `read_s` for each block that it reads."""

    def __init__(self, read_s: float = 0.0) -> None:
        self.read_s = read_s
        self.num_reads = self.num_writes = 0

    def write(self, slot: int, data: memoryview) -> None:
        self.num_writes += 1

    def read(self, slot: int, data: memoryview) -> bool:
        time.sleep(self.read_s)
        self.num_reads += 1
        return True

    def close(self) -> None: ...


def fake_driver(disk: FakeDisk, **bounds: float) -> tuple[CacheTiers, TierDriver]:
    host: Any = FakeHost()
    tiers = CacheTiers(host, 8, 16)
    return tiers, TierDriver(tiers, host, disk, lambda: None, **bounds)  # type: ignore[arg-type]


async def fill_disk(tiers: CacheTiers, disk: FakeDisk) -> list[BlockHash]:
    """Four blocks that only the disk has: eight others have their places on the host."""
    hashes = [BlockHash(bytes([index])) for index in range(4)]
    for index, block_hash in enumerate([*hashes, *(BlockHash(bytes([10 + index])) for index in range(8))]):
        tiers.save(block_hash, index)
        while disk.num_writes <= index:  # noqa: ASYNC110, what is awaited is done by a thread
            await asyncio.sleep(0.001)
    assert {tiers.place(block_hash) for block_hash in hashes} == {CacheTier.DISK}
    return hashes


async def test_a_loop_that_stood_still_does_not_lose_a_sound_disk() -> None:
    disk = FakeDisk()
    tiers, driver = fake_driver(disk, timeout_s=0.1)
    task = driver.start()
    tiers.save(BlockHash(b"a"), 0)
    while not disk.num_writes:  # noqa: ASYNC110
        await asyncio.sleep(0)
    time.sleep(0.3)  # noqa: ASYNC251, the loop stands still, not the disk
    await asyncio.sleep(0.01)
    assert not task.done()
    await driver.stop()


@pytest.mark.parametrize(("read_s", "bound_s", "all_read"), [(0.0, 60.0, True), (0.1, 0.05, False)])
async def test_nobody_waits_for_a_slow_disk_longer_than_a_bound(read_s: float, bound_s: float, all_read: bool) -> None:
    disk = FakeDisk(read_s)
    tiers, driver = fake_driver(disk, reading_bound_s=bound_s)
    driver.start()
    asked = await fill_disk(tiers, disk)
    number = tiers.read(asked)
    async with asyncio.timeout(5.0):
        while not tiers.is_read(number):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert (disk.num_reads == len(asked)) is all_read
    await driver.stop()
