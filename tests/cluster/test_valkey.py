"""The embedded Valkey: answers, stops, and dies with whoever started it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from cluster import processes, valkey
from cluster.valkey import EmbeddedValkey
from core.errors import CommandFailed

LAUNCHER = """
import asyncio, pathlib, sys, time
from cluster.valkey import EmbeddedValkey
server = asyncio.run(EmbeddedValkey.start(pathlib.Path(sys.argv[1])))
print(server.port, flush=True)
time.sleep(60)
"""


async def test_it_answers_on_loopback_and_ends(tmp_path: Path) -> None:
    server = await EmbeddedValkey.start(tmp_path / "valkey.log")
    process = processes.listening_on(server.port)
    assert process is not None and process in processes.descendants(os.getpid())
    client = redis.Redis.from_url(server.url)
    try:
        assert client.ping()
        assert client.config_get("bind")["bind"] == "127.0.0.1"
        assert client.config_get("save")["save"] == ""
    finally:
        client.close()
        server.stop()
    server.stop()  # harmless
    assert not processes.is_alive(process)


async def test_a_server_that_cannot_start_is_reported_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(valkey, "MAX_MEMORY", "nonsense")
    with pytest.raises(CommandFailed, match=r"valkey\.log"):
        await EmbeddedValkey.start(tmp_path / "valkey.log")


async def test_it_dies_when_its_launcher_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path / "valkey.log")]
    launcher = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    port = int(await launcher.stdout.readline())
    (server,) = processes.descendants(launcher.pid)
    assert server == processes.listening_on(port)
    os.kill(launcher.pid, signal.SIGKILL)
    await launcher.wait()
    assert not await processes.wait_gone([server], timeout_s=5.0)
