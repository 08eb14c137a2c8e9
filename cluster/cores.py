"""On which of a machine's cores to compute."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

SYSFS: Final = Path("/sys")


def apart(cores: Iterable[int], sysfs: Path = SYSFS) -> list[int]:
    """In order, but those that are the same physical core as one before come last: its threads take turns. Linux, by
    sysfs; a core of which that says nothing counts as a physical one."""
    first_threads: list[int] = []
    other_threads: list[int] = []
    seen: set[str] = set()
    for core in sorted(cores):
        file = sysfs / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list"
        physical = file.read_text() if file.exists() else f"cpu{core}"
        (other_threads if physical in seen else first_threads).append(core)
        seen.add(physical)
    return first_threads + other_threads
