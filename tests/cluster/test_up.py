"""`tandem up` from start to end, with stub processes: what it prints, and what it leaves behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cluster import processes
from cluster.free_ports import free_ports

SCRIPT = Path(__file__).with_name("stub_cluster.py")
PARITY = "parity: aggregated == disaggregated (96/96 tokens), KV moved 0.0 MiB by NIXL/cma, 0 orphaned blocks"
RAY_FOLDER = r"/tmp/tandem-ray-\w+"
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0


def log_names(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.glob("run/*/logs/*.log"))


async def start(folder: Path, redis_url: str = "") -> asyncio.subprocess.Process:
    folders = [Path.cwd(), Path.cwd() / "proto/python", SCRIPT.parent]
    return await asyncio.create_subprocess_exec(
        sys.executable,
        str(SCRIPT),
        *map(str, free_ports(3)),
        str(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(map(str, folders)),
            "TANDEM_CACHE": str(folder),
            "TANDEM_API_KEY": "sesame",
            "TANDEM_REDIS_URL": redis_url,
            "TMPDIR": "/tmp",
        },
    )


async def read_until(process: asyncio.subprocess.Process, text: str) -> str:
    """Everything printed up to the line with `text`."""
    assert process.stdout is not None
    seen = ""
    async with asyncio.timeout(START_TIMEOUT_S):
        while text not in seen:
            line = await process.stdout.readline()
            assert line, seen
            seen += line.decode()
    return seen


async def test_up_serves_after_its_check_and_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    process = await start(tmp_path)
    seen = await read_until(process, "serving")
    for wanted in (PARITY, "first token", "curl http://", "InferenceService/Generate", "/metrics"):
        assert wanted in seen, seen
    assert seen.count("Bearer $TANDEM_API_KEY") == 3 and "sesame" not in seen
    assert all(re.match(r"\[ *\d+\.\d s\]", line) for line in seen.splitlines()[:5]), seen
    enough_cores = len(os.sched_getaffinity(0)) >= 2
    assert seen.count(" is ready, on core ") == (2 if enough_cores else 0), seen
    below = processes.descendants(process.pid)
    assert len(below) > 5  # Valkey, Ray's own, and three actors

    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)  # impatient
    output = await asyncio.wait_for(process.stdout.read(), STOP_TIMEOUT_S)  # type: ignore[union-attr]
    assert await process.wait() == 0, output.decode()
    assert "no process left" in output.decode()
    assert "killing" not in output.decode()
    assert not {other for other in below if processes.is_alive(other)}
    assert log_names(tmp_path) == ["decode-0.log", "prefill-0.log", "router.log", "valkey.log"]


@pytest.mark.parametrize(("victim", "redis_url"), [("supervisor", ""), ("launcher", "redis://:secret@127.0.0.1:9/0")])
async def test_a_killed_launcher_takes_everything_with_it(tmp_path: Path, victim: str, redis_url: str) -> None:
    """With a Redis that is not there, too, which is said once and stops nobody."""
    process = await start(tmp_path, redis_url)
    seen = await read_until(process, "is ready")
    assert seen.count("redis_url: no Redis answers") == bool(redis_url) and "secret" not in seen
    below = processes.descendants(process.pid)
    ray_folders = {Path(found) for other in below for found in re.findall(RAY_FOLDER, processes.command_of(other))}
    launcher = min(below, key=lambda other: (other.start_ticks, other.pid))
    os.kill(process.pid if victim == "supervisor" else launcher.pid, signal.SIGKILL)
    assert await process.wait() in (-signal.SIGKILL, 128 + signal.SIGKILL)
    left = await processes.wait_gone(below, timeout_s=20.0)
    assert not left, [processes.command_of(other) for other in left]
    assert ray_folders
    assert not [folder for folder in ray_folders if folder.exists()]
