"""Real Valkeys on loopback: a primary with a replica, and the Sentinel that watches them."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import redis

from cluster.free_ports import free_ports
from tests.kv_transfer.valkey_process import launch, until

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
        primary = stack.enter_context(_server(primary_port, folder, "--save", ""))
        stack.enter_context(_server(replica_port, folder, "--save", "", "--replicaof", f"127.0.0.1 {primary_port}"))
        stack.enter_context(_server(sentinel_port, folder, before=(str(file), "--sentinel")))
        with redis.Redis(port=sentinel_port, socket_timeout=1) as client:
            until(lambda: any("slave" in str(item["flags"]) for item in client.sentinel_slaves(PRIMARY)))
        yield Watched(f"redis+sentinel://127.0.0.1:{sentinel_port}/{PRIMARY}", primary, sentinel_port)


@contextlib.contextmanager
def _server(port: int, folder: Path, *options: str, before: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[bytes]]:
    process = launch(port, folder, *options, before=before)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
