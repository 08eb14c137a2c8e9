"""How fast KV blocks move between two processes of this host, beside what bounds it.

    python -m bench.kv_transfer [--lane auto|tcp] [--rounds 9]

One table, medians of interleaved rounds: `NixlTransport.push`, a bare NIXL loop (same library, same target, no asyncio
and no queue), a TCP socket over loopback, and a copy of the same scattered blocks inside one process. Takes below 60 s.
Other work on the cores moves every figure: compare within one run only.
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
from typing import Any, Final

import numpy as np

from core.identity import CacheIdentity
from core.membership import WorkerRef
from kv_transfer.nixl import NixlTransport
from kv_transfer.nixl_library import load_nixl
from kv_transfer.nixl_probe import Envelope
from kv_transfer.pool import MemoryPool
from kv_transfer.transport import PoolDescription

BLOCK_BYTES: Final = 720 << 10  # SmolLM2-135M, 16 tokens, float32
NUM_BLOCKS: Final = 256
BLOCK_COUNTS: Final = (8, 64, 256)
TIME_LIMIT_S: Final = 50.0
IDENTITY: Final = CacheIdentity(1, "bench", "bench", "float32", "bench", 16, 30, 3, 64, 1, "bench")

Path = Callable[[list[int], list[int]], float]  # (source blocks, target blocks) -> seconds


def make_pool(fill: int) -> np.ndarray:
    """[NUM_BLOCKS, BLOCK_BYTES] uint8, every page touched."""
    return np.full((NUM_BLOCKS, BLOCK_BYTES), fill, dtype=np.uint8)


def memory_pool(blocks: np.ndarray) -> MemoryPool:
    return MemoryPool(blocks.ctypes.data, NUM_BLOCKS, BLOCK_BYTES)


async def be_target() -> None:
    """The other process: a transport, and a socket that receives blocks in place."""
    blocks = make_pool(0)
    transport = NixlTransport(WorkerRef("target", str(os.getpid())), IDENTITY, memory_pool(blocks))
    transport.listen(lambda *_: None, lambda _: None)
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=receive_blocks, args=(listener, blocks), daemon=True).start()
    hello = (transport.describe(), listener.getsockname()[1])
    print(base64.b64encode(pickle.dumps(hello)).decode(), flush=True)
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
def target_process() -> Iterator[tuple[PoolDescription, int]]:
    command = [sys.executable, "-m", "bench.kv_transfer", "--target"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        yield pickle.loads(base64.b64decode(process.stdout.readline()))
        process.stdin.close()


def timed(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def memcpy_path(blocks: np.ndarray) -> Path:
    other = make_pool(0)

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
    agent: Any = load_nixl("DRAM").open_agent(f"bare@{os.getpid()}")
    agent.register_memory([(blocks.ctypes.data, blocks.nbytes, 0, "")], "DRAM")
    name = agent.add_remote_agent(Envelope.decode(peer.agent_metadata).metadata).decode()

    def prepare(side: str, address: int) -> Any:
        row = [address, BLOCK_BYTES, 0, BLOCK_BYTES, NUM_BLOCKS]
        return agent.prep_xfer_dlist(side, np.array([row], dtype=np.uint64), "DRAM")

    ours, theirs = prepare("NIXL_INIT_AGENT", blocks.ctypes.data), prepare(name, peer.base_address)

    def write(source: list[int], target: list[int]) -> None:
        source_ids, target_ids = np.array(source, dtype=np.int32), np.array(target, dtype=np.int32)
        handle = agent.make_prepped_xfer("WRITE", ours, source_ids, theirs, target_ids, b"Nbare")
        state = agent.transfer(handle)
        while state == "PROC":
            time.sleep(100e-6)
            state = agent.check_xfer_state(handle)
        handle.release()

    return lambda source, target: timed(lambda: write(source, target))


def push_path(transport: NixlTransport, peer: PoolDescription, runner: asyncio.Runner) -> Path:
    async def push(source: list[int], target: list[int]) -> float:
        started_s = time.perf_counter()
        await transport.push(peer.ref, source, target, b"pushed")
        return time.perf_counter() - started_s

    return lambda source, target: runner.run(push(source, target))


def measure(paths: dict[str, Path], rounds: int, deadline_s: float) -> dict[str, list[float]]:
    """GB/s of each path for each of BLOCK_COUNTS: medians over `rounds`, fewer when time is up."""
    order = np.random.default_rng(0)
    medians: dict[str, list[float]] = {name: [] for name in paths}
    for count in BLOCK_COUNTS:
        seconds: dict[str, list[float]] = {name: [] for name in paths}
        for number in range(rounds + 1):
            source, target = (order.permutation(NUM_BLOCKS)[:count].tolist() for _ in range(2))
            for name, path in paths.items():
                took_s = path(source, target)
                if number:  # the first warms
                    seconds[name].append(took_s)
            if number and time.monotonic() > deadline_s:
                break
        for name, values in seconds.items():
            medians[name].append(count * BLOCK_BYTES / statistics.median(values) / 1e9)
    return medians


def print_table(medians: dict[str, list[float]]) -> None:
    heads = [f"{count} blocks" for count in BLOCK_COUNTS]
    print(f"| GB/s (share of copy) | {' | '.join(heads)} |")
    print("| --- " * (len(heads) + 1) + "|")
    copies = medians["copy in one process"]
    for name, values in medians.items():
        cells = [f"{value:.2f} ({value / copy:.2f})" for value, copy in zip(values, copies, strict=True)]
        print(f"| {name} | {' | '.join(cells)} |")


def run(lane: str, rounds: int) -> None:
    if lane == "tcp":
        os.environ["UCX_TLS"] = "tcp"
    deadline_s = time.monotonic() + TIME_LIMIT_S
    blocks = make_pool(7)
    with asyncio.Runner() as runner, target_process() as (peer, port):
        transport = NixlTransport(WorkerRef("source", str(os.getpid())), IDENTITY, memory_pool(blocks))

        async def connect() -> None:
            transport.listen(lambda *_: None, lambda _: None)
            link = await transport.connect(peer)
            print(
                f"lane: {link.lane}, probe {link.probe_gbps:.2f} GB/s; {BLOCK_BYTES >> 10} KiB blocks, {rounds} rounds"
            )

        runner.run(connect())
        paths = {
            "NixlTransport.push": push_path(transport, peer, runner),
            "bare NIXL loop": bare_nixl_path(blocks, peer),
            "TCP socket, loopback": socket_path(blocks, port),
            "copy in one process": memcpy_path(blocks),
        }
        print_table(measure(paths, rounds, deadline_s))
        runner.run(transport.close())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lane", choices=("auto", "tcp"), default="auto", help="tcp: forbid UCX everything else")
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds for each number of blocks (default 9)")
    parser.add_argument("--target", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.target:
        asyncio.run(be_target())
    else:
        run(arguments.lane, arguments.rounds)


if __name__ == "__main__":
    main()
