"""What the processes of a cluster that nobody asks anything take of a core, by thread.

    python -m bench.idle_cpu --pid PID [--seconds 30]

PID: of `tandem up` (or of one process); all its descendants are read. CPU seconds per wall second, from /proc: a clock
tick is 10 ms, so below 0.1 % of a core nothing is told apart in 30 s. A thread has the name that its library gave it.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
LEAST_SHARE: Final = 0.0005  # of a core: what takes less is not listed


@dataclass(frozen=True, slots=True)
class Stat:
    """One line of /proc/.../stat."""

    name: str
    parent: int
    cpu_s: float

    @classmethod
    def read(cls, folder: Path) -> Stat:
        head, _, tail = (folder / "stat").read_text().rpartition(")")
        fields = tail.split()
        return cls(head.partition("(")[2], int(fields[1]), (int(fields[11]) + int(fields[12])) / TICKS_PER_S)


def descendants(pid: int) -> list[int]:
    """`pid` and all below it."""
    children: dict[int, list[int]] = defaultdict(list)
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            children[Stat.read(folder).parent].append(int(folder.name))
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
    found, open_pids = [], [pid]
    while open_pids:
        found.append(open_pids.pop())
        open_pids += children[found[-1]]
    return found


def read_threads(pid: int) -> dict[int, Stat]:
    return {int(folder.name): Stat.read(folder) for folder in Path(f"/proc/{pid}/task").iterdir()}


def command_of(pid: int) -> str:
    return " ".join(Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0"))[:100]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pid", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=30.0)
    arguments = parser.parse_args()
    before = {pid: read_threads(pid) for pid in descendants(arguments.pid)}
    started_s = time.monotonic()
    time.sleep(arguments.seconds)
    after = {pid: read_threads(pid) for pid in before if Path(f"/proc/{pid}").exists()}
    wall_s = time.monotonic() - started_s
    total = 0.0
    for pid, threads in after.items():
        shares = {
            thread: (stat.cpu_s - before[pid][thread].cpu_s) / wall_s
            for thread, stat in threads.items()
            if thread in before[pid]
        }
        total += sum(shares.values())
        if sum(shares.values()) < LEAST_SHARE:
            continue
        print(f"{sum(shares.values()):7.2%}  {pid}  {command_of(pid)}")
        for thread in sorted(shares, key=shares.__getitem__, reverse=True):
            if shares[thread] >= LEAST_SHARE:
                print(f"   {shares[thread]:7.2%}  {thread}  {threads[thread].name}")
    print(f"{total:7.2%}  all, over {wall_s:.0f} s")


if __name__ == "__main__":
    main()
