"""Faults of NIXL peers, each run as its own process by test_nixl_processes.py: native code can abort its process.

`python nixl_scenarios.py SCENARIO` plays the sender and starts targets (`target WORKER_ID INCARNATION`) as children.
A target prints its description, then one line for each notice, with the first byte of each block of its pool.
"""

from __future__ import annotations

import asyncio
import base64
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
from transport_ends import IDENTITY, until

from core.errors import TransferFailed, WorkerLost
from core.membership import WorkerRef
from kv_transfer.nixl import NixlConfig, NixlTransport
from kv_transfer.nixl_probe import LANE_LOOPBACK, LANE_MEMORY
from kv_transfer.pool import MemoryPool
from kv_transfer.transport import PoolDescription

NUM_BLOCKS = 192
BLOCK_BYTES = 720 << 10
LOST_BOUND_S = 5.0
ALL_BLOCKS = range(NUM_BLOCKS)
EXPECTED_LANE = LANE_LOOPBACK if os.environ.get("UCX_TLS") == "tcp" else LANE_MEMORY


def open_end(worker_id: str, incarnation: str, fill: int, config: NixlConfig) -> tuple[NixlTransport, np.ndarray]:
    blocks = np.full((NUM_BLOCKS, BLOCK_BYTES), fill, dtype=np.uint8)
    pool = MemoryPool(blocks.ctypes.data, NUM_BLOCKS, BLOCK_BYTES)
    return NixlTransport(WorkerRef(worker_id, incarnation), IDENTITY, pool, config), blocks


async def be_target(worker_id: str, incarnation: str) -> None:
    transport, blocks = open_end(worker_id, incarnation, 0, NixlConfig())
    asked_back = asyncio.Event()

    def hear(_sender: WorkerRef, notice: bytes) -> None:
        print(notice.decode(), blocks[:, 0].tobytes().hex(), blocks[:, -1].tobytes().hex(), flush=True)
        if notice == b"back":
            asked_back.set()

    transport.listen(hear, lambda _: None)
    print(base64.b64encode(pickle.dumps(transport.describe())).decode(), flush=True)
    sender = pickle.loads(base64.b64decode(sys.stdin.readline()))
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()  # ends with its parent
    if sender is not None:
        await transport.connect(sender)
        await asked_back.wait()
        await transport.push(sender.ref, [5], [6], b"from the target")
    await asyncio.Event().wait()


@dataclass
class Target:
    """A target process, as the sender sees it."""

    process: asyncio.subprocess.Process
    description: PoolDescription
    lines: list[str] = field(default_factory=list)

    @property
    def ref(self) -> WorkerRef:
        return self.description.ref

    def heard(self, notice: str) -> list[str]:
        """First and last byte of each block when `notice` came, hex; [] if it has not come."""
        return next((line.split(" ")[1:] for line in self.lines if line.split(" ")[0] == notice), [])

    async def read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.lines.append(line.decode().strip())


@dataclass
class Sender:
    transport: NixlTransport
    blocks: np.ndarray
    lost: list[WorkerRef] = field(default_factory=list)
    notices: list[bytes] = field(default_factory=list)
    _readers: list[asyncio.Task[None]] = field(default_factory=list)

    async def start_target(self, incarnation: str, *, connects_back: bool = False) -> Target:
        process = await asyncio.create_subprocess_exec(
            sys.executable, __file__, "target", "decode-0", incarnation,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None and process.stdin is not None
        description = pickle.loads(base64.b64decode(await process.stdout.readline()))
        ours = self.transport.describe() if connects_back else None
        process.stdin.write(base64.b64encode(pickle.dumps(ours)) + b"\n")
        target = Target(process, description)
        self._readers.append(asyncio.create_task(target.read()))
        return target

    async def connect(self, target: Target) -> None:
        link = await self.transport.connect(target.description)
        assert link.lane == EXPECTED_LANE, link

    async def push_all(self, target: Target, value: int) -> None:
        """Fill the target's pool with `value`, and see it there."""
        self.blocks[:] = value
        await self.transport.push(target.ref, ALL_BLOCKS, ALL_BLOCKS[::-1], b"full-%d" % value)
        await until(lambda: bool(target.heard(f"full-{value}")))
        assert target.heard(f"full-{value}") == [bytes([value] * NUM_BLOCKS).hex()] * 2

    async def expect_lost(self, target: Target) -> None:
        await until(lambda: self.lost == [target.ref])
        await must_be_lost(self.transport.push(target.ref, [0], [0], b""))
        await self.transport.drop(target.ref)
        assert self.lost == [target.ref]


@asynccontextmanager
async def sender(config: NixlConfig | None = None) -> AsyncIterator[Sender]:
    transport, blocks = open_end("prefill-0", "s1", 1, config or NixlConfig(drop_timeout_s=0.5))
    end = Sender(transport, blocks)
    transport.listen(lambda _, notice: end.notices.append(notice), end.lost.append)
    yield end
    await transport.close()


async def must_be_lost(call: Awaitable[object]) -> None:
    try:
        async with asyncio.timeout(LOST_BOUND_S):
            await call
    except WorkerLost:
        return
    raise AssertionError("expected WorkerLost")


async def kill_mid_push() -> None:
    async with sender() as end:
        target = await end.start_target("t1")
        await end.connect(target)
        await end.push_all(target, 3)
        pushes = [
            asyncio.create_task(end.transport.push(target.ref, ALL_BLOCKS, ALL_BLOCKS, b"burst")) for _ in range(12)
        ]
        await asyncio.wait(pushes, return_when=asyncio.FIRST_COMPLETED)
        target.process.kill()
        killed_s = time.monotonic()
        async with asyncio.timeout(LOST_BOUND_S):
            outcomes = await asyncio.gather(*pushes, return_exceptions=True)
        print(f"all settled {time.monotonic() - killed_s:.3f} s after the kill")
        assert None in outcomes
        assert {type(outcome) for outcome in outcomes if outcome is not None} == {WorkerLost}
        await end.expect_lost(target)
        assert end.transport.stats().in_flight == 0


async def kill_idle() -> None:
    async with sender() as end:
        target = await end.start_target("t1")
        await end.connect(target)
        await end.push_all(target, 3)
        target.process.kill()
        await target.process.wait()
        await must_be_lost(end.transport.push(target.ref, [0], [0], b"late"))
        await end.expect_lost(target)
        await must_be_lost(end.connect(target))


async def kill_before_connect() -> None:
    async with sender(NixlConfig(connect_timeout_s=2.0, drop_timeout_s=0.5)) as end:
        target = await end.start_target("t1")
        target.process.kill()
        await target.process.wait()
        await must_be_lost(end.connect(target))
        alive = await end.start_target("t2")
        await end.connect(alive)
        await end.push_all(alive, 4)
        assert end.lost == []


async def freeze_and_thaw() -> None:
    """Over TCP: a frozen peer settles nothing until it thaws; then everything lands, and life goes on."""
    async with sender() as end:
        target = await end.start_target("t1")
        await end.connect(target)
        await end.push_all(target, 3)
        target.process.send_signal(signal.SIGSTOP)
        end.blocks[:] = 9
        push = asyncio.create_task(end.transport.push(target.ref, ALL_BLOCKS, ALL_BLOCKS, b"thawed"))
        assert not (await asyncio.wait([push], timeout=1.0))[0]
        assert not target.heard("thawed")
        try:
            await end.transport.drop(target.ref)
            raise AssertionError("dropped with a push in flight")
        except TransferFailed:
            assert end.transport.stats().zombies == 1
        await must_be_lost(end.connect(target))
        target.process.send_signal(signal.SIGCONT)
        async with asyncio.timeout(LOST_BOUND_S):
            await push
        await until(lambda: bool(target.heard("thawed")))
        assert target.heard("thawed") == [bytes([9] * NUM_BLOCKS).hex()] * 2
        await end.transport.drop(target.ref)
        await end.connect(target)
        await end.push_all(target, 5)
        assert end.lost == []


async def close_under_freeze() -> None:
    """A push to a frozen peer does not keep the transport from closing; the peer survives."""
    async with sender() as end:
        target = await end.start_target("t1")
        await end.connect(target)
        await end.push_all(target, 3)
        target.process.send_signal(signal.SIGSTOP)
        push = asyncio.create_task(end.transport.push(target.ref, ALL_BLOCKS, ALL_BLOCKS, b"never"))
        assert not (await asyncio.wait([push], timeout=0.2))[0]
        async with asyncio.timeout(LOST_BOUND_S):
            await end.transport.close()
        await must_be_lost(push)
        target.process.send_signal(signal.SIGCONT)
    async with asyncio.timeout(LOST_BOUND_S):
        again, _ = open_end("prefill-0", "s2", 1, NixlConfig())
        again.listen(lambda *_: None, lambda _: None)
        await again.connect(target.description)
        await again.push(target.ref, [0], [0], b"survived")
        await until(lambda: bool(target.heard("survived")))
        await again.close()


async def connect_to_frozen() -> None:
    async with sender(NixlConfig(connect_timeout_s=0.5, drop_timeout_s=0.5)) as end:
        target = await end.start_target("t1")
        target.process.send_signal(signal.SIGSTOP)
        await must_be_lost(end.connect(target))
        target.process.send_signal(signal.SIGCONT)
        await end.transport.drop(target.ref)
        await end.connect(target)
        await end.push_all(target, 3)


async def restart() -> None:
    """The same worker_id in a new process: the old incarnation is lost, the new one reachable, three times over."""
    async with sender() as end:
        target = await end.start_target("t0")
        await end.connect(target)
        for life in range(1, 4):
            await end.push_all(target, life)
            target.process.kill()
            await target.process.wait()
            old, target = target, await end.start_target(f"t{life}")
            assert old.ref.worker_id == target.ref.worker_id
            await must_be_lost(end.transport.push(old.ref, [0], [0], b"old"))
            await end.connect(target)
        await end.push_all(target, 9)
        assert [ref.incarnation for ref in end.lost] == ["t0", "t1", "t2"]


async def both_ways() -> None:
    """Two processes connect to each other at once and push both ways."""
    async with sender() as end:
        target = await end.start_target("t1", connects_back=True)
        await end.connect(target)
        await end.push_all(target, 8)
        end.blocks[:] = 1
        await end.transport.notify(target.ref, b"back")
        await until(lambda: end.notices == [b"from the target"])
        assert end.blocks[:, 0].tolist() == [1] * 6 + [8] + [1] * (NUM_BLOCKS - 7)


SCENARIOS: dict[str, Callable[[], Awaitable[None]]] = {
    scenario.__name__: scenario
    for scenario in (
        kill_mid_push, kill_idle, kill_before_connect, freeze_and_thaw, close_under_freeze, connect_to_frozen,
        restart, both_ways,
    )
}  # fmt: skip


async def main() -> None:
    if sys.argv[1] == "target":
        await be_target(*sys.argv[2:])
    else:
        await SCENARIOS[sys.argv[1]]()


if __name__ == "__main__":
    asyncio.run(main())
