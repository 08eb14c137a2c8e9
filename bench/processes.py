"""What a process and all below it take: memory, CPU time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")


def process_tree(pid: int) -> Iterator[int]:
    """The process and all below it, whichever of its threads started them."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            yield from process_tree(int(child))


def status_bytes(pid: int, key: str) -> int:
    """A size of /proc/PID/status, such as VmRSS; 0 of a process that has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except FileNotFoundError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:")), 0)


def cpu_s(folder: Path) -> float:
    """User and system time of /proc/PID, all its threads, or of one thread's folder in its `task`. The second field of
    `stat` may hold spaces, and ends with the last bracket: proc(5)."""
    fields = (folder / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S
