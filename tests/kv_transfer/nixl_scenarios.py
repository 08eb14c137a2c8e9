"""Faults of NIXL peers, each run as its own process by test_nixl_processes.py: native code can abort its process.

`python nixl_scenarios.py SCENARIO` plays the sender and starts targets (`target WORKER_ID INCARNATION`) as children.
A target prints its description, then one line for each notice, with the first byte of each block of its pool.
"""

from __future__ import annotations

import asyncio
import base64
import gc
import mmap
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import numpy as np
from transport_ends import IDENTITY, until

from core.errors import PeerRefused, TransferFailed, WorkerLost
from core.membership import WorkerRef
from kv_transfer.nixl import NixlConfig, NixlTransport
from kv_transfer.nixl_probe import LANE_LOOPBACK, LANE_MEMORY
from kv_transfer.pool import MemoryPool, PoolDescription

NUM_BLOCKS = 192
BLOCK_BYTES = 720 << 10
LOST_BOUND_S = 5.0
ALL_BLOCKS = range(NUM_BLOCKS)
EXPECTED_LANE = LANE_LOOPBACK if os.environ.get("UCX_TLS") == "tcp" else LANE_MEMORY


def open_end(worker_id: str, incarnation: str, fill: int, config: NixlConfig) -> tuple[NixlTransport, np.ndarray]:
    memory = mmap.mmap(-1, NUM_BLOCKS * BLOCK_BYTES)  # a mapping of its own: gone with the array
    blocks = np.frombuffer(memory, dtype=np.uint8).reshape(NUM_BLOCKS, BLOCK_BYTES)
    blocks[:] = fill
    pool = MemoryPool((blocks.ctypes.data,), NUM_BLOCKS, BLOCK_BYTES)
    return NixlTransport(WorkerRef(worker_id, incarnation), IDENTITY, pool, config), blocks


async def be_target(worker_id: str, incarnation: str) -> None:
    """On "back" push to the sender; on "leave" close, and live on; on "move" also unmap the pool, and be another."""
    transport, blocks = open_end(worker_id, incarnation, 0, NixlConfig())
    asked_back = asyncio.Event()

    def hear(_sender: WorkerRef, notice: bytes) -> None:
        print(notice.decode(), blocks[:, 0].tobytes().hex(), blocks[:, -1].tobytes().hex(), flush=True)
        if notice == b"back":
            asked_back.set()
        elif notice in (b"leave", b"move"):
            tasks.append(asyncio.ensure_future(leave(notice == b"move")))

    async def leave(and_move: bool) -> None:
        nonlocal transport, blocks
        await transport.close()
        if and_move:
            del blocks
            gc.collect()  # the mapping is gone: a write to it would end this process
            transport, blocks = open_end(worker_id, f"{incarnation}-moved", 0, NixlConfig())
            transport.listen(hear, lambda _: None)
        print("moved" if and_move else "left", encode(transport.describe()), flush=True)

    tasks: list[asyncio.Future[None]] = []
    transport.listen(hear, lambda _: None)
    print(encode(transport.describe()), flush=True)
    sender = pickle.loads(base64.b64decode(sys.stdin.readline()))
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()  # ends with its parent
    if sender is not None:
        await transport.connect(sender)
        await asked_back.wait()
        await transport.push(sender.ref, [5], [6], b"from the target")
    await asyncio.Event().wait()


def encode(value: object) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


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

    def alive(self) -> bool:
        return self.process.returncode is None

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

    async def start_target(
        self,
        incarnation: str,
        *,
        connects_back: bool = False,
        inside: Sequence[str] = (),
        prepare: Callable[[asyncio.subprocess.Process], None] = lambda _process: None,
    ) -> Target:
        """inside: a command that runs the target's. prepare: what is to be done before the target says hello."""
        process = await asyncio.create_subprocess_exec(
            *inside, sys.executable, __file__, "target", "decode-0", incarnation,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None and process.stdin is not None
        prepare(process)
        description = pickle.loads(base64.b64decode(await process.stdout.readline()))
        ours = self.transport.describe() if connects_back else None
        process.stdin.write(encode(ours).encode() + b"\n")
        target = Target(process, description)
        self._readers.append(asyncio.create_task(target.read()))
        return target

    async def connect(self, target: Target) -> None:
        link = await self.transport.connect(target.description)
        assert link.lane == EXPECTED_LANE, link

    async def connect_again(self, target: Target) -> None:
        """As cluster/worker/peers.py: until it works."""
        while True:
            try:
                return await self.connect(target)
            except WorkerLost:
                await asyncio.sleep(0.1)

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
        num_pushed = 0

        async def push_forever() -> None:
            nonlocal num_pushed
            while True:
                await end.transport.push(target.ref, ALL_BLOCKS, ALL_BLOCKS, b"burst")
                num_pushed += 1

        pushes = [asyncio.create_task(push_forever()) for _ in range(4)]  # so that some are always in flight
        await until(lambda: num_pushed > 0)
        target.process.kill()
        killed_s = time.monotonic()
        async with asyncio.timeout(LOST_BOUND_S):
            outcomes = await asyncio.gather(*pushes, return_exceptions=True)
        print(f"all settled {time.monotonic() - killed_s:.3f} s after the kill")
        assert [type(outcome) for outcome in outcomes] == [WorkerLost] * 4
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


async def freeze_over_cma() -> None:
    """The sender copies: its push settles, and a frozen peer finds bytes and notice when it thaws."""
    async with sender() as end:
        target = await end.start_target("t1")
        await end.connect(target)
        await end.push_all(target, 3)
        target.process.send_signal(signal.SIGSTOP)
        end.blocks[:] = 9
        async with asyncio.timeout(LOST_BOUND_S):
            await end.transport.push(target.ref, ALL_BLOCKS, ALL_BLOCKS, b"thawed")
        assert not target.heard("thawed")
        target.process.send_signal(signal.SIGCONT)
        await until(lambda: bool(target.heard("thawed")))
        assert target.heard("thawed") == [bytes([9] * NUM_BLOCKS).hex()] * 2
        assert end.lost == []


async def leave_cleanly() -> None:
    """A peer closes and its process lives on: lost at once, and it takes no harm from what still comes."""
    async with sender() as end:
        target = await end.start_target("t1", connects_back=True)
        await end.connect(target)
        await end.push_all(target, 3)
        await end.transport.notify(target.ref, b"leave")
        await until(lambda: bool(target.heard("left")))
        await must_be_lost(end.transport.push(target.ref, ALL_BLOCKS, ALL_BLOCKS, b"late"))
        await end.expect_lost(target)
        assert target.alive()


async def stale_list() -> None:
    """A peer moves its pool, as a new incarnation, and unmaps the old one: a push by the old list harms nobody."""
    async with sender(NixlConfig(connect_timeout_s=3.0, drop_timeout_s=0.5)) as end:
        target = await end.start_target("t1", connects_back=True)
        await end.connect(target)
        await end.push_all(target, 3)
        await end.transport.notify(target.ref, b"move")
        await until(lambda: bool(target.heard("moved")))
        await must_be_lost(end.transport.push(target.ref, ALL_BLOCKS, ALL_BLOCKS, b"stale"))
        await must_be_lost(end.connect(target))  # by the old description
        old = target.ref
        await until(lambda: end.lost == [old])
        target.description = pickle.loads(base64.b64decode(target.heard("moved")[0]))
        assert target.alive() and target.ref != old
        await end.connect(target)
        await end.push_all(target, 4)


async def restart_under_the_old_name() -> None:
    """A restart that takes its old incarnation, which no worker of ours does: never a write by the old list."""
    async with sender() as end:
        old = await end.start_target("t1")
        await end.connect(old)
        await end.push_all(old, 3)
        old.process.kill()
        await old.process.wait()
        new = await end.start_target("t1")
        assert new.ref == old.ref
        await must_be_lost(end.transport.push(new.ref, [0], [0], b"by the old list"))
        await end.transport.drop(new.ref)
        await must_be_lost(end.connect(old))  # by the old description
        await end.connect(new)
        await end.push_all(new, 4)
        assert new.lines[0].startswith("full-4")


async def version_mismatch() -> None:
    """Refused by name before NIXL hears of the peer, which is unharmed; the same version then connects."""
    async with sender() as end:
        target = await end.start_target("t1")
        other = replace(target.description, transport_version="1.0.1")
        try:
            await end.transport.connect(other)
            raise AssertionError("connected to another version")
        except PeerRefused as refused:
            assert refused.field == "transport_version"
        await must_be_lost(end.transport.push(target.ref, [0], [0], b""))
        await end.connect(target)
        await end.push_all(target, 3)


async def black_hole() -> None:
    """The network swallows everything: the path is lost after UCX_TCP_USER_TIMEOUT, and works again once mended.

    Runs in a network namespace of its own, its target in another one, a veth pair between them.
    """
    run("mount", "-t", "sysfs", "sysfs", "/sys")
    ip("link", "set", "lo", "up")
    ip("link", "add", "ours", "type", "veth", "peer", "name", "theirs")
    ip("addr", "add", "10.9.0.1/24", "dev", "ours")
    for end_of_pair in ("ours", "theirs"):
        ip("link", "set", end_of_pair, "up")  # both: without a carrier UCX would not use ours

    def join(process: asyncio.subprocess.Process) -> None:
        ip("link", "set", "theirs", "netns", str(process.pid))
        ip("addr", "add", "10.9.0.2/24", "dev", "theirs", inside=process.pid)
        ip("link", "set", "lo", "up", inside=process.pid)
        ip("link", "set", "theirs", "up", inside=process.pid)
        assert process.stdin is not None
        process.stdin.write(b"\n")

    # UCX looks into /sys for interfaces; the shell waits for a line, so that the interface is there by then.
    own_sys = 'mount -t sysfs sysfs /sys && read line && exec "$@"'
    inside = ["unshare", "--net", "--mount", "sh", "-c", own_sys, "sh"]
    async with sender() as end:
        target = await end.start_target("t1", inside=inside, prepare=join)
        await end.connect(target)
        await end.push_all(target, 3)
        ip("link", "set", "theirs", "down", inside=target.process.pid)
        cut_s = time.monotonic()
        await must_be_lost(end.transport.push(target.ref, ALL_BLOCKS, ALL_BLOCKS, b"swallowed"))
        print(f"lost {time.monotonic() - cut_s:.1f} s after the cut")
        await end.expect_lost(target)
        ip("link", "set", "theirs", "up", inside=target.process.pid)
        async with asyncio.timeout(LOST_BOUND_S):
            await end.connect_again(target)
        await end.push_all(target, 5)
        assert not target.heard("swallowed")


def ip(*words: str, inside: int | None = None) -> None:
    enter = ["nsenter", "--target", str(inside), "--net"] if inside is not None else []
    run(*enter, "ip", *words)


def run(*command: str) -> None:
    subprocess.run(command, check=True)


SCENARIOS: dict[str, Callable[[], Awaitable[None]]] = {
    scenario.__name__: scenario
    for scenario in (
        kill_mid_push, kill_idle, kill_before_connect, freeze_and_thaw, close_under_freeze, connect_to_frozen,
        restart, both_ways, freeze_over_cma, leave_cleanly, stale_list, restart_under_the_old_name, version_mismatch,
        black_hole,
    )
}  # fmt: skip


async def main() -> None:
    if sys.argv[1] == "target":
        await be_target(*sys.argv[2:])
    else:
        await SCENARIOS[sys.argv[1]]()


if __name__ == "__main__":
    asyncio.run(main())
