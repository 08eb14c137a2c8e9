"""A worker process of the real soak (tests/simulation/real_soak.py): real sessions, scheduler, driver, NIXL; no model.

What stands around them here stands in for cluster/worker/process.py. The KV is the token memory of the cluster world,
kept in the pool that NIXL writes to: each slot is one number, many times over, so a torn write shows. A free block is
sealed by a checksum: that somebody wrote to it is found when it is taken, hit, or looked at after a schedule.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import random
import socket
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import xxhash

from cluster.worker.router_streams import RouterStreams
from core.errors import PeerRefused, WorkerLost
from core.handoff import BlocksPushed, HandoffNotice, Landed, Quiet, StopPushing
from core.identity import BlockHash, CacheIdentity
from core.membership import Role, WorkerRef
from core.messages import CancelRequest, ResyncCache
from decode_worker.service import DecodeService
from decode_worker.session import DecodeConfig, DecodeSession
from engine.block_pool import BlockPool
from engine.scheduler import Scheduler
from engine.scheduler_config import SchedulerConfig
from kv_transfer.checksum import BlockChecksums
from kv_transfer.credit import PushCredit
from kv_transfer.driver import HandoffDriver, HandoffOutcome, PushReport
from kv_transfer.effects import LeaseConfig, LoadFailurePolicy
from kv_transfer.faults import FaultyTransport, TransportFaults
from kv_transfer.nixl import NixlConfig, NixlTransport
from kv_transfer.notice_codec import decode_notice, encode_notice
from kv_transfer.pace import TransferPace
from kv_transfer.pool import MemoryPool, PoolDescription
from kv_transfer.prefix_index import IndexStats, PrefixHit
from kv_transfer.session import HandoffSessions
from prefill_worker.service import PrefillService
from prefill_worker.session import PrefillConfig, PrefillSession
from telemetry.tasks import BackgroundTasks
from tests.simulation.chained_kv import BLOCK_SIZE, LIMITS, NUM_BLOCKS, ChainMemory, WriteIntoForeignBlock
from tests.simulation.planted_bugs import PLANTS
from tests.worker_info import worker_info

BLOCK_BYTES = 16 << 10
LEASE = LeaseConfig(lease_s=0.5, renew_s=0.1, settle_s=0.5, stop_retry_s=0.1, landed_timeout_s=0.5)
NIXL = NixlConfig(connect_timeout_s=1.0, drop_timeout_s=0.2, interface="lo", probe_bytes=64 << 10)
IDENTITY = CacheIdentity(1, "soak", "soak", "digest", "soak", BLOCK_SIZE, 1, 1, 1, 1, "soak")
TICK_S = 0.02
CONNECT_AGAIN_S = 0.02


class TornRead(Exception):
    """A slot holds parts of two writes."""


class PoolSlots:
    """`TokenMemory.slots`, in memory that peers write to."""

    def __init__(self, words: np.ndarray) -> None:
        self._words = words  # [blocks, slots, copies], uint64; 0: never written

    def __setitem__(self, slot: tuple[int, int], value: int) -> None:
        self._words[slot] = value + 1

    def __getitem__(self, slot: tuple[int, int]) -> int:
        words = self._words[slot]
        if not (words == words[0]).all():
            raise TornRead(f"block {slot[0]}, slot {slot[1]}: {np.unique(words)[:4]}")
        return int(words[0]) - 1

    def __contains__(self, slot: tuple[int, int]) -> bool:
        return self[slot] >= 0

    def get(self, slot: tuple[int, int], default: int | None = None) -> int | None:
        value = self[slot]
        return value if value >= 0 else default

    def pop(self, slot: tuple[int, int], _default: None) -> None:
        self._words[slot] = 0


class SealedPool(BlockPool):
    """A pool that remembers what free blocks hold, and finds out when it has changed."""

    def __init__(self, words: np.ndarray) -> None:
        super().__init__(NUM_BLOCKS)
        self._words = words
        self._seals = [self._digest(block) for block in range(NUM_BLOCKS)]

    def hold(self, blocks: Iterable[int]) -> None:
        blocks = tuple(blocks)
        self._check_seals(block for block in blocks if block in self._free)
        super().hold(blocks)

    def release(self, blocks: Sequence[int]) -> None:
        super().release(blocks)
        self._seal(blocks)

    def end_quarantine(self, blocks: Iterable[int]) -> None:
        blocks = tuple(blocks)
        super().end_quarantine(blocks)
        self._seal(blocks)

    def check(self) -> None:
        super().check()
        self._check_seals(self._free)

    def _take(self, num_blocks: int) -> list[int]:
        taken = super()._take(num_blocks)
        self._check_seals(taken)
        return taken

    def _seal(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if block in self._free:
                self._seals[block] = self._digest(block)

    def _check_seals(self, blocks: Iterable[int]) -> None:
        changed = [block for block in blocks if self._digest(block) != self._seals[block]]
        if changed:
            raise WriteIntoForeignBlock(f"blocks {changed} were written while they were free")

    def _digest(self, block: int) -> int:
        return xxhash.xxh3_64_intdigest(self._words[block])


class StrangeTransport(FaultyTransport):
    """Beside the faults of a fabric: notices that no honest peer would send, about hand-offs that are open."""

    strange = 0.0

    def _arrived(self, sender: WorkerRef, notice: bytes) -> None:
        super()._arrived(sender, notice)
        decoded = decode_notice(notice)
        if decoded is None or self._random.random() >= self.strange:
            return
        twisted = self._random.choice(
            [Quiet("strange"), StopPushing(), Landed(), BlocksPushed(0, 0, 1, 1, (3,)), BlocksPushed(1, 9, 2)]
        )
        handoff_id, generation = decoded[0].handoff_id, decoded[0].generation + self._random.randrange(100, 200)
        self._on_notice(sender, encode_notice(HandoffNotice(handoff_id, generation, twisted)))


class SoakIndex:
    """Who has which block, as the conductor says it."""

    def __init__(self) -> None:
        self.stats = IndexStats()
        self.holders: dict[BlockHash, set[WorkerRef]] = {}

    async def lookup(self, hashes: Sequence[BlockHash]) -> PrefixHit:
        best = PrefixHit()
        for ref in self.holders.get(hashes[0], set()):
            held = itertools.takewhile(lambda item, ref=ref: ref in self.holders.get(item, ()), hashes)
            best = max(best, PrefixHit(len(list(held)), (ref,)), key=lambda hit: hit.num_blocks)
        return best

    async def announce(self, hashes: Sequence[BlockHash]) -> None: ...

    async def withdraw(self, hashes: Sequence[BlockHash]) -> None: ...

    async def purge(self, ref: WorkerRef) -> None: ...

    async def close(self) -> None: ...


class SoakWorker:
    def __init__(self, ref: WorkerRef, role: Role, writer: asyncio.StreamWriter) -> None:
        self.ref, self.writer = ref, writer
        copies = BLOCK_BYTES // 8 // BLOCK_SIZE
        self.words = np.zeros((NUM_BLOCKS, BLOCK_SIZE, copies), dtype=np.uint64)
        self.salts: dict[str, str] = {}
        rng = random.Random(str(ref))
        self.pool = SealedPool(self.words)
        self.memory = ChainMemory(self.pool, self.salts.__getitem__)
        self.memory.slots = PoolSlots(self.words)  # type: ignore[assignment]
        self.scheduler = Scheduler(SchedulerConfig(rng.choice([8, 16, 64]), 16), self.pool, LIMITS, b"id", no_watch)
        region = MemoryPool((self.words.ctypes.data,), NUM_BLOCKS, BLOCK_BYTES)
        self.transport = StrangeTransport(NixlTransport(ref, IDENTITY, region, NIXL), TransportFaults())
        pace = TransferPace(BLOCK_BYTES)
        policy = rng.choice(list(LoadFailurePolicy))
        self.handoffs = HandoffSessions(ref, self.pool, LEASE, self.pool.match, pace.bound_s, policy)
        credit, checksums = PushCredit(BLOCK_BYTES, 4 * BLOCK_BYTES), BlockChecksums(region)
        self.driver = HandoffDriver(
            self.transport, self.handoffs, time.monotonic, self.handoff_ended, self.broken, credit, pace, checksums
        )
        self.driver.listener.peer_lost = self.peer_lost
        self.driver.listener.pushed = self.pushed
        self.driver.listener.verified = self.verified
        self.streams = RouterStreams(self.pool, self.scheduler.holds)
        self.stream, _ = self.streams.open("soak")
        self.tasks = BackgroundTasks(self.broken)
        self.peers: dict[WorkerRef, PoolDescription] = {}
        self.connected: set[WorkerRef] = set()
        self.counts = {"pushes": 0, "failed pushes": 0, "damaged pushes": 0}
        self.index = SoakIndex()
        self.service: PrefillService | DecodeService
        self.session: PrefillSession | DecodeSession
        if role is Role.PREFILL:
            prefill = PrefillSession(
                PrefillConfig(BLOCK_BYTES, min_fetch_blocks=2, fetch_timeout_s=0.5), self.scheduler, self.handoffs
            )
            self.session = prefill
            self.service = PrefillService(
                prefill, self.driver, self.index, self.connected.__contains__, self.streams.send, self.wake,
                self.tasks.spawn, time.monotonic,
            )  # fmt: skip
        else:
            decode = DecodeSession(DecodeConfig(BLOCK_BYTES, reserve_timeout_s=5.0), self.scheduler, self.handoffs)
            self.session = decode
            self.service = DecodeService(decode, self.driver, self.streams.send, self.wake, time.monotonic)
        self.work = asyncio.Event()
        info = worker_info(ref, role, block_size=BLOCK_SIZE, block_bytes=BLOCK_BYTES, num_blocks=NUM_BLOCKS)
        self.say("hello", info, self.transport.describe())

    def say(self, *message: object) -> None:
        payload = pickle.dumps(message)
        self.writer.write(len(payload).to_bytes(4, "little") + payload)

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Until the conductor is gone."""
        self.tasks.spawn(self.step_forever())
        self.tasks.spawn(self.forward())
        self.tasks.spawn(self.tick_forever())
        while True:
            self.handle(*await read_message(reader))

    def handle(self, kind: str, *rest: Any) -> None:
        match kind:
            case "command":
                self.command(rest[0])
            case "peer":
                self.peers[rest[0].ref] = rest[0]
                self.tasks.spawn(self.connect(rest[0].ref))
            case "dead":
                self.peers.pop(rest[0], None)
                self.connected.discard(rest[0])
                for holders in self.index.holders.values():
                    holders.discard(rest[0])
                self.tasks.spawn(self.driver.peer_dead(rest[0]))
            case "faults":
                self.transport.inject(rest[0])
                self.transport.strange = rest[1]
            case "cached":
                ref, stored, evicted = rest
                for item in stored:
                    self.index.holders.setdefault(item, set()).add(ref)
                for item in evicted:
                    self.index.holders.get(item, set()).discard(ref)
            case "left":
                self.say("left", rest[0], self.left(), self.counts | {"preemptions": self.scheduler.num_preemptions})

    def command(self, command: Any) -> None:
        if isinstance(command, ResyncCache):
            self.stream.feed.begin_again()
            return
        if isinstance(command, CancelRequest):
            self.service.command(command)
            self.streams.disown(command.request_id)
            return
        self.salts[command.request.request_id] = command.request.cache_salt
        self.streams.own(self.stream, command)
        self.service.command(command)

    def left(self) -> dict[str, object]:
        """What is held or known although no request is open; the seals are looked at too."""
        self.pool.check()
        load = self.scheduler.load()
        found = {
            "used": self.pool.num_used,
            "quarantined": self.pool.num_quarantined,
            "hand-offs": [*self.handoffs.source._open.values(), *self.handoffs.target._open.values()],
            "requests": len(self.service) + load.running_requests + load.waiting_requests,
            "owners": len(self.streams._owner),
            "unconnected": len(self.peers.keys() - self.connected),
        }
        return {name: value for name, value in found.items() if value}

    # --- what the parts call ---

    def wake(self) -> None:
        self.work.set()

    def handoff_ended(self, outcome: HandoffOutcome) -> None:
        self.service.handoff_ended(outcome)

    async def step_forever(self) -> None:
        """As engine/loop.py, which takes torch along: seconds at each restart."""
        while True:
            self.work.clear()
            plan = self.scheduler.plan()
            if plan is None:
                await self.work.wait()
                continue
            progress = self.scheduler.commit(plan, await asyncio.to_thread(self.memory.run, plan))
            self.streams.step(self.service.stepped(progress), self.scheduler.load(), self.pool.moves.take())
            for item in progress:
                if item.ended:
                    self.streams.disown(item.request_id)

    def pushed(self, report: PushReport) -> None:
        self.counts["pushes" if report.delivered else "failed pushes"] += 1

    def verified(self, _duration_s: float, whole: bool) -> None:
        self.counts["damaged pushes"] += not whole

    def peer_lost(self, ref: WorkerRef) -> None:
        if ref in self.connected:
            self.connected.discard(ref)
            self.tasks.spawn(self.connect(ref))

    async def connect(self, ref: WorkerRef) -> None:
        while ref in self.peers:
            try:
                link = await self.driver.connect(self.peers[ref])
            except (WorkerLost, PeerRefused):
                await asyncio.sleep(CONNECT_AGAIN_S)
                continue
            if ref in self.peers:
                self.connected.add(ref)
                self.streams.send(link)
            return

    async def forward(self) -> None:
        while (answer := await self.stream.outbox.get()) is not None:
            self.say("answer", answer)

    async def tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.driver.tick()
            self.service.tick()
            changes = self.pool.moves.take()
            if changes.stored or changes.evicted:
                self.say("cached", changes.stored, changes.evicted)

    def broken(self, error: BaseException) -> None:
        """Say why at once, and end: nothing after this counts."""
        self.say("broken", f"{self.ref}: " + "".join(traceback.format_exception(error)))
        asyncio.get_running_loop().call_later(0.2, os._exit, 70)


def no_watch(_request: object) -> Any:
    raise AssertionError("no request here has stop strings")


async def read_message(reader: asyncio.StreamReader) -> Any:
    size = int.from_bytes(await reader.readexactly(4), "little")
    return pickle.loads(await reader.readexactly(size))


async def main(descriptor: int) -> None:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor))
    try:
        ref, role, plant = await read_message(reader)
    except asyncio.IncompleteReadError:
        return  # a spare that was not needed
    if plant:
        PLANTS[plant](setattr)
    worker = SoakWorker(ref, role, writer)
    try:
        await worker.serve(reader)
    except (asyncio.IncompleteReadError, ConnectionResetError):
        os._exit(0)  # the conductor is gone
    except Exception as error:
        worker.broken(error)
        await asyncio.sleep(1.0)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
