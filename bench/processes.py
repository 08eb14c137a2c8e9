"""How much memory a process and all below it hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


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
