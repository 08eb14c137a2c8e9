"""First token of a prompt that was computed before: computed again, copied back from host memory, read from the disk.

    python -m bench.tiers [--folder DIR] [--tokens 1024] [--rounds 5]

The default model in float32 on our CPU kernels, through the engine's loop, the three in turns. Before the disk is read
its file is dropped from the page cache, so that the folder's disk is read. A stream decodes beside them: its longest
gap is what it waits for copies and disk, where the prompt is not computed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

from cluster.folders import default_model_folder
from core.blocks import CacheTier, num_blocks_for
from core.identity import BlockHash
from core.request import GenerateRequest, SamplingParams, StopConditions
from engine.block_pool import BlockPool
from engine.cache_tiers import CacheTiers
from engine.cpu.runner import CpuModelRunner
from engine.disk_slots import DiskSlots
from engine.host_slots import HostSlots
from engine.loop import EngineLoop, StepReport
from engine.scheduler import Scheduler
from engine.scheduler_config import SchedulerConfig
from engine.sequence import ModelLimits
from engine.step import Progress
from engine.tier_driver import TierDriver

STREAM_TOKENS, STREAM_BLOCKS = 512, 40
WAYS = ("computed", "host", "disk")


class Worker:
    """An engine with both tiers, each with room for the prompt twice."""

    def __init__(self, folder: Path, num_tokens: int) -> None:
        self.num_blocks = num_blocks_for(num_tokens, 16) + 1
        self.runner = CpuModelRunner.load(default_model_folder(), "float32", self.num_blocks + STREAM_BLOCKS)
        self.host = HostSlots(self.runner.kv_pools, 2 * self.num_blocks)
        self.disk = DiskSlots(folder, 3 * self.num_blocks, self.host.slot_bytes)
        self.tiers = CacheTiers(self.host, 2 * self.num_blocks, 3 * self.num_blocks)
        self.pool = BlockPool(self.num_blocks + STREAM_BLOCKS, self.tiers)
        limits = ModelLimits(16, self.runner.max_context_tokens, ())
        self.scheduler = Scheduler(SchedulerConfig(), self.pool, limits, b"bench", lambda _request: None)
        self.loop = EngineLoop(self.scheduler, self.runner, self._stepped)
        self.driver = TierDriver(self.tiers, self.host, self.disk, self.loop.wake)
        self.first: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.stream_at_s: list[float] = []
        self.num_fillers = 0

    def _stepped(self, progress: list[Progress], _report: StepReport) -> None:
        for item in progress:
            if item.deltas:
                self.first[item.request_id].set()
                if item.request_id.startswith("stream"):
                    self.stream_at_s.append(time.perf_counter())

    def add(self, name: str, tokens: range, max_tokens: int, salt: str = "") -> None:
        request = GenerateRequest(
            name, tuple(tokens), SamplingParams(0.0), StopConditions(max_tokens, ignore_eos=True), cache_salt=salt
        )
        self.scheduler.add(self.scheduler.new_sequence(request))
        self.loop.wake()

    async def ttft_s(self, name: str, tokens: range, salt: str = "") -> float:
        begun_s = time.perf_counter()
        self.add(name, tokens, 1, salt)
        await self.first[name].wait()
        return time.perf_counter() - begun_s

    def evict(self) -> None:
        """All that is cached goes to the host."""
        self.tiers.allow_copies(bounded=False)
        self.pool.release(self.pool.allocate(self.pool.num_free) or [])

    async def evict_from_host(self, hashes: list[BlockHash]) -> None:
        """Blocks of nobody take the place of these there, as fast as the disk takes them."""
        while any(self.pool.place(block_hash) is not CacheTier.DISK for block_hash in hashes):
            (block,) = self.pool.allocate(1) or []
            self.num_fillers += 1
            self.pool.cache(block, BlockHash(self.num_fillers.to_bytes(32)))
            self.pool.release([block])
            await asyncio.sleep(0.005)
        descriptor = self.disk._file.fileno()
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


async def measure(folder: Path, num_tokens: int, rounds: int) -> tuple[Worker, dict[str, list[float]], list[float]]:
    worker, prompt = Worker(folder, num_tokens), range(5, 5 + num_tokens)
    tasks = [worker.loop.start(), worker.driver.start()]
    took: dict[str, list[float]] = {way: [] for way in WAYS}
    gaps: list[float] = []
    for number in range(rounds + 1):
        salt = f"round {number}"
        worker.add(f"stream {number}", range(40), STREAM_TOKENS)
        await worker.first[f"stream {number}"].wait()
        hashes = worker.scheduler.new_sequence(
            GenerateRequest("r", tuple(prompt), SamplingParams(0.0), StopConditions(1), cache_salt=salt)
        ).reusable_hashes()
        took["computed"].append(await worker.ttft_s(f"computed {number}", prompt, salt))
        worker.evict()
        since = len(worker.stream_at_s) - 1
        took["host"].append(await worker.ttft_s(f"host {number}", prompt, salt))
        gaps.append(longest_gap_s(worker, since))
        worker.evict()
        await worker.evict_from_host(hashes)
        since = len(worker.stream_at_s) - 1
        took["disk"].append(await worker.ttft_s(f"disk {number}", prompt, salt))
        gaps.append(longest_gap_s(worker, since))
        worker.scheduler.cancel(f"stream {number}")
        worker.evict()
    await worker.loop.stop()
    await worker.driver.stop()
    for task in tasks:
        if not task.cancelled():
            task.result()
    return worker, {way: times[1:] for way, times in took.items()}, gaps[2:]


def longest_gap_s(worker: Worker, since: int) -> float:
    times = worker.stream_at_s[max(0, since) :]
    return max((after - before for before, after in pairwise(times)), default=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="of the disk tier")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    worker, took, gaps = asyncio.run(measure(arguments.folder, arguments.tokens, arguments.rounds))
    hits = worker.pool.hit_blocks
    print(f"{arguments.tokens} tokens, blocks of {worker.host.slot_bytes >> 10} KiB; hits {dict(hits)}")
    print("| first token | median, ms | least | most | of computed |\n| --- | --- | --- | --- | --- |")
    computed_s = statistics.median(took["computed"])
    for way, times in took.items():
        median_s = statistics.median(times)
        row = f"{1e3 * median_s:.0f} | {1e3 * min(times):.0f} | {1e3 * max(times):.0f} | {median_s / computed_s:.3f}"
        print(f"| {way} | {row} |")
    print(f"longest gap of a stream beside host and disk: median {1e3 * statistics.median(gaps):.0f} ms")


if __name__ == "__main__":
    main()
