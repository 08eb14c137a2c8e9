"""How fast KV blocks move between two processes of this host, beside what bounds it.

    python -m bench.kv_transfer [--lane auto|tcp] [--rounds 25]

For each size of a block, rounds of four ways in turn to move the same scattered blocks: `NixlTransport.push`, a bare
NIXL loop (same library, same target, no asyncio and no queue), a TCP socket over loopback, and a copy in one process.
The rate is that of 360 MiB at once; then a prompt of 1,024 tokens as one push, whose share of a push's fixed cost is
larger; then one block, which is little but fixed cost. Ratios are medians of the rounds' own ratios, in a random order:
other work on the cores moves every figure, so compare within one run only. Then how long the target's answer to a push
of one small block takes, at once and after a rest, and what the idle thread takes of a core. About three minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import os
import pickle
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path as FilePath
from typing import Any, Final

import numpy as np

from core.identity import CacheIdentity
from core.membership import WorkerRef
from kv_transfer.doorbell import Doorbell
from kv_transfer.nixl import NixlTransport
from kv_transfer.nixl_library import load_nixl
from kv_transfer.nixl_probe import Envelope
from kv_transfer.pool import MemoryPool, PoolDescription

BLOCK_SIZES: Final = (16 << 10, 64 << 10, 256 << 10, 720 << 10, 2880 << 10)  # 720 KiB: SmolLM2-135M, 16 tokens, float32
POOL_BYTES: Final = 720 << 20
LONG_BYTES: Final = 360 << 20  # 8,192 tokens of that model
PROMPT_BYTES: Final = 45 << 20  # 1,024 tokens
TIME_LIMIT_S: Final = 15.0  # for each size of a block and number of blocks
IDLE_S: Final = 30.0
REST_S: Final = 0.05
NUM_ANSWERS: Final = 100
BOUND_S: Final = 10.0
ASK, ANSWER = b"answer", b"answered"
IDENTITY: Final = CacheIdentity(1, "bench", "bench", "float32", "bench", 16, 30, 3, 64, 1, "bench")

PUSH, BARE, SOCKET, COPY = "push", "bare NIXL", "TCP socket", "copy"  # the ways, as they are named in the table

Path = Callable[[list[int], list[int]], float]  # (source blocks, target blocks) -> seconds


def make_pool(block_bytes: int, fill: int) -> np.ndarray:
    """[blocks, block_bytes] uint8, every page touched."""
    return np.full((POOL_BYTES // block_bytes, block_bytes), fill, dtype=np.uint8)


def memory_pool(blocks: np.ndarray) -> MemoryPool:
    return MemoryPool((blocks.ctypes.data,), *blocks.shape)


async def be_target(block_bytes: int) -> None:
    """The other process: a transport that answers, and a socket that receives blocks in place."""
    blocks = make_pool(block_bytes, 0)
    transport = NixlTransport(WorkerRef("target", str(os.getpid())), IDENTITY, memory_pool(blocks))
    answers: set[asyncio.Task[None]] = set()

    def heard(sender: WorkerRef, notice: bytes) -> None:
        if notice == ASK:
            task = asyncio.ensure_future(transport.notify(sender, ANSWER))
            answers.add(task)
            task.add_done_callback(answers.discard)

    transport.listen(heard, lambda _: None)
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=receive_blocks, args=(listener, blocks), daemon=True).start()
    hello = (transport.describe(), listener.getsockname()[1])
    print(base64.b64encode(pickle.dumps(hello)).decode(), flush=True)
    await transport.connect(pickle.loads(base64.b64decode(await asyncio.to_thread(sys.stdin.readline))))
    print("connected", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await transport.close()


def receive_blocks(listener: socket.socket, blocks: np.ndarray) -> None:
    """For each message [count, block ids, bytes of each block] answer one byte when all are in."""
    connection, _ = listener.accept()
    stream = connection.makefile("rb", buffering=0)
    while head := stream.read(4):
        ids = np.empty(int.from_bytes(head, "little"), dtype=np.int32)
        receive_into(connection, ids.data.cast("B"))
        for block in ids:
            receive_into(connection, memoryview(blocks[block]))
        connection.sendall(b"!")


def receive_into(connection: socket.socket, view: memoryview) -> None:
    while view:
        view = view[connection.recv_into(view) :]


@contextmanager
def target_process(block_bytes: int, source: PoolDescription) -> Iterator[tuple[PoolDescription, int]]:
    command = [sys.executable, "-m", "bench.kv_transfer", "--target", str(block_bytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        hello = process.stdout.readline()
        process.stdin.write(base64.b64encode(pickle.dumps(source)) + b"\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"connected\n"
        yield pickle.loads(base64.b64decode(hello))
        process.stdin.close()


def timed(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def memcpy_path(blocks: np.ndarray) -> Path:
    other = make_pool(blocks.shape[1], 0)

    def copy(source: list[int], target: list[int]) -> None:
        for source_block, target_block in zip(source, target, strict=True):
            np.copyto(other[target_block], blocks[source_block])

    return lambda source, target: timed(lambda: copy(source, target))


def socket_path(blocks: np.ndarray, port: int) -> Path:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(source: list[int], target: list[int]) -> None:
        connection.sendall(len(target).to_bytes(4, "little") + np.array(target, dtype=np.int32).tobytes())
        for block in source:
            connection.sendall(memoryview(blocks[block]))
        connection.recv(1)

    return lambda source, target: timed(lambda: send(source, target))


def bare_nixl_path(blocks: np.ndarray, peer: PoolDescription) -> Path:
    agent: Any = load_nixl("DRAM").open_agent(f"bare@{os.getpid()}-{peer.pool.block_bytes}")
    agent.register_memory([(blocks.ctypes.data, blocks.nbytes, 0, "")], "DRAM")
    envelope, doorbell = Envelope.decode(peer.agent_metadata), Doorbell("127.0.0.1")
    name = agent.add_remote_agent(envelope.metadata).decode()

    def prepare(side: str, address: int) -> Any:
        row = [address, peer.pool.block_bytes, 0, peer.pool.block_bytes, peer.pool.num_blocks]
        return agent.prep_xfer_dlist(side, np.array([row], dtype=np.uint64), "DRAM")

    ours, theirs = prepare("NIXL_INIT_AGENT", blocks.ctypes.data), prepare(name, peer.pool.base_addresses[0])

    def write(source: list[int], target: list[int]) -> None:
        source_ids, target_ids = np.array(source, dtype=np.int32), np.array(target, dtype=np.int32)
        handle = agent.make_prepped_xfer("WRITE", ours, source_ids, theirs, target_ids, b"Nbare")
        state = agent.transfer(handle)
        doorbell.ring(envelope.bell)
        while state == "PROC":
            time.sleep(100e-6)
            doorbell.ring(envelope.bell)
            state = agent.check_xfer_state(handle)
        handle.release()

    return lambda source, target: timed(lambda: write(source, target))


def push_path(transport: NixlTransport, peer: PoolDescription, runner: asyncio.Runner) -> Path:
    async def push(source: list[int], target: list[int]) -> float:
        started_s = time.perf_counter()
        await transport.push(peer.ref, source, target, b"pushed")
        return time.perf_counter() - started_s

    return lambda source, target: runner.run(push(source, target))


def measure(paths: dict[str, Path], num_blocks: int, count: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each path in each round; fewer rounds when time is up."""
    order, deadline_s = np.random.default_rng(0), time.monotonic() + TIME_LIMIT_S
    seconds: dict[str, list[float]] = {name: [] for name in paths}
    for number in range(rounds + 1):
        source, target = (order.permutation(num_blocks)[:count].tolist() for _ in range(2))
        for name in order.permutation([*paths]):  # who comes second finds warm what the first has left
            took_s = paths[name](source, target)
            if number:  # the first warms
                seconds[name].append(took_s)
        if number and time.monotonic() > deadline_s:
            break
    return seconds


def ratios(seconds: dict[str, list[float]], name: str, against: str) -> str:
    """Of speeds, in the median and, against the bare loop, with quartiles."""
    pairs = zip(seconds[name], seconds[against], strict=True)
    least, median, most = statistics.quantiles((other / ours for ours, other in pairs), n=4)
    return f"{median:.2f} ({least:.2f}-{most:.2f})" if against == BARE else f"{median:.2f}"


def print_rows(
    block_bytes: int, long: dict[str, list[float]], prompt: dict[str, list[float]], one: dict[str, list[float]]
) -> None:
    num_bytes = LONG_BYTES // block_bytes * block_bytes
    for name, seconds in long.items():
        cells = [
            f"{num_bytes / statistics.median(seconds) / 1e9:.2f}",
            *(ratios(long, name, against) for against in (BARE, SOCKET, COPY)),
            ratios(prompt, name, BARE),
            f"{statistics.median(one[name]) * 1e6:.0f}",
        ]
        print(f"| {block_bytes >> 10} KiB | {name} | {' | '.join(cells)} |", flush=True)


async def answer_times(transport: NixlTransport, peer: WorkerRef, answers: asyncio.Queue[bytes]) -> str:
    """From a push of one block to the target's answer to it, at once after the last answer and after a rest."""
    texts: list[str] = []
    for rest_s in (0.0, REST_S):
        seconds: list[float] = []
        for block in range(NUM_ANSWERS):
            await asyncio.sleep(rest_s)
            started_s = time.perf_counter()
            async with asyncio.timeout(BOUND_S):
                await transport.push(peer, [block % 8], [block % 8], ASK)
                await answers.get()
            seconds.append(time.perf_counter() - started_s)
        median_s, p95_s = statistics.median(seconds), statistics.quantiles(seconds, n=20)[-1]
        texts.append(f"{median_s * 1e6:.0f} (p95 {p95_s * 1e6:.0f}) after {rest_s * 1e3:.0f} ms")
    return ", ".join(texts)


def idle_share(transport: NixlTransport) -> float:
    """CPU time of the transport's thread while nothing moves, as a share of a core."""
    stat = FilePath(f"/proc/self/task/{transport._thread._thread.native_id}/stat")

    def cpu_s() -> float:
        fields = stat.read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    before_s = cpu_s()
    time.sleep(IDLE_S)
    return (cpu_s() - before_s) / IDLE_S


def run(lane: str, rounds: int) -> None:
    if lane == "tcp":
        os.environ["UCX_TLS"] = "tcp"
    print(f"up to {rounds} rounds, load average {os.getloadavg()[0]:.1f}")
    print(f"| block | way | GB/s | to {BARE} | to {SOCKET} | to {COPY} | 45 MiB, to {BARE} | one block, us |")
    print("| --- " * 8 + "|")
    for block_bytes in BLOCK_SIZES:
        blocks, answers = make_pool(block_bytes, 7), asyncio.Queue[bytes]()
        transport = NixlTransport(WorkerRef("source", f"{os.getpid()}-{block_bytes}"), IDENTITY, memory_pool(blocks))
        with asyncio.Runner() as runner:
            runner.run(listen(transport, answers))
            with target_process(block_bytes, transport.describe()) as (peer, port):
                link = runner.run(transport.connect(peer))
                paths = {
                    PUSH: push_path(transport, peer, runner),
                    BARE: bare_nixl_path(blocks, peer),
                    SOCKET: socket_path(blocks, port),
                    COPY: memcpy_path(blocks),
                }
                sizes = [(LONG_BYTES, rounds), (PROMPT_BYTES, 4 * rounds), (block_bytes, 4 * rounds)]
                print_rows(block_bytes, *(measure(paths, len(blocks), size // block_bytes, n) for size, n in sizes))
                if block_bytes == BLOCK_SIZES[0]:
                    took = runner.run(answer_times(transport, peer.ref, answers))
                    share = idle_share(transport)
                runner.run(transport.close())
    print(f"lane: {link.lane}, probe {link.probe_gbps:.2f} GB/s; idle thread: {share:.2%} of a core")
    print(f"one block and its answer, us: {took}")


async def listen(transport: NixlTransport, answers: asyncio.Queue[bytes]) -> None:
    transport.listen(lambda _sender, notice: answers.put_nowait(notice), lambda _peer: None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lane", choices=("auto", "tcp"), default="auto", help="tcp: forbid UCX everything else")
    parser.add_argument("--rounds", type=int, default=25, help="of 360 MiB; four times as many of less (default 25)")
    parser.add_argument("--target", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.target:
        asyncio.run(be_target(arguments.target))
    else:
        run(arguments.lane, arguments.rounds)


if __name__ == "__main__":
    main()
