"""The processes below us: who they are, whether they still run, and how none outlives us. Linux, by /proc."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h
PR_SET_CHILD_SUBREAPER: Final = 36
POLL_S: Final = 0.02

# Loaded here because nothing may be loaded between fork and exec.
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Process:
    """One process. The start time tells it from a later one with the same pid."""

    pid: int
    start_ticks: int  # clock ticks after boot


@dataclass(frozen=True, slots=True)
class _Stat:
    process: Process
    parent_pid: int
    state: str


def descendants(root_pid: int) -> set[Process]:
    """All processes below `root_pid`, itself not included; zombies are not processes any more."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    stats = [stat for pid in pids if (stat := _read_stat(pid))]
    below: set[int] = {root_pid}
    found: set[Process] = set()
    grew = True
    while grew:
        new = [stat for stat in stats if stat.parent_pid in below and stat.process.pid not in below]
        below.update(stat.process.pid for stat in new)
        found.update(stat.process for stat in new if stat.state not in "ZX")
        grew = bool(new)
    return found


def find(pid: int) -> Process | None:
    """The process that has this pid now."""
    stat = _read_stat(pid)
    return stat.process if stat else None


def listening_on(port: int) -> Process | None:
    """The process that listens on this loopback port, if we may look into it."""
    listening = "0A"  # include/net/tcp_states.h
    rows = [
        line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    sockets = {f"socket:[{row[9]}]" for row in rows if row[3] == listening and row[1].endswith(f":{port:04X}")}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is another user's
            if entry.name.isdigit() and any(os.readlink(file) in sockets for file in (entry / "fd").iterdir()):
                return find(int(entry.name))
    return None


def is_alive(process: Process) -> bool:
    """Whether it still runs; a zombie does not."""
    stat = _read_stat(process.pid)
    return stat is not None and stat.process == process and stat.state not in "ZX"


def command_of(process: Process) -> str:
    """Its command line, for messages."""
    try:
        return Path(f"/proc/{process.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "(gone)"


def kill(process: Process) -> None:
    """SIGKILL it, if it is still the same process."""
    if is_alive(process):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


async def wait_gone(processes: Iterable[Process], timeout_s: float) -> set[Process]:
    """Wait until none of them runs; returns those that still do after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    left = {process for process in processes if is_alive(process)}
    while left and time.monotonic() < deadline_s:
        await asyncio.sleep(POLL_S)
        left = {process for process in left if is_alive(process)}
    return left


def adopt_orphans() -> None:
    """Make this process the parent of whatever its descendants leave behind, so that `descendants` sees all of it."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """After a fork: get this signal when the thread that forked us ends. Fork in a thread that lives on."""
    _prctl(PR_SET_PDEATHSIG, number)


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def _read_stat(pid: int) -> _Stat | None:
    """proc(5): the command, in parentheses, may hold anything; the fields behind it are fixed."""
    try:
        rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return _Stat(Process(pid, int(rest[19])), int(rest[1]), rest[0])
