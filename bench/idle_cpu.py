"""What the processes of a cluster that nobody asks anything take of a core, by thread.

    python -m bench.idle_cpu --pid PID [--seconds 30]

PID: of `tandem up` (or of one process); all its descendants are read. CPU seconds per wall second, from /proc: a clock
tick is 10 ms, so below 0.1 % of a core nothing is told apart in 30 s. A thread has the name that its library gave it.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Final

from bench.processes import cpu_s
from cluster import processes

LEAST_SHARE: Final = 0.0005  # of a core: what takes less is not listed


def read_threads(pid: int) -> dict[Path, float]:
    """CPU seconds so far, by thread."""
    return {folder: cpu_s(folder) for folder in Path(f"/proc/{pid}/task").iterdir()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pid", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=30.0)
    arguments = parser.parse_args()
    root = processes.find(arguments.pid)
    if root is None:
        parser.error(f"--pid: there is no process {arguments.pid}")
    before = {process: read_threads(process.pid) for process in (root, *processes.descendants(root.pid))}
    started_s = time.monotonic()
    time.sleep(arguments.seconds)
    after = {process: read_threads(process.pid) for process in before if processes.is_alive(process)}
    wall_s = time.monotonic() - started_s
    total = 0.0
    for process, threads in after.items():
        known = before[process]
        shares = {thread: (used_s - known[thread]) / wall_s for thread, used_s in threads.items() if thread in known}
        total += sum(shares.values())
        if sum(shares.values()) < LEAST_SHARE:
            continue
        print(f"{sum(shares.values()):7.2%}  {process.pid}  {processes.command_of(process)[:100]}")
        for thread in sorted(shares, key=shares.__getitem__, reverse=True):
            if shares[thread] >= LEAST_SHARE:
                print(f"   {shares[thread]:7.2%}  {thread.name}  {(thread / 'comm').read_text().strip()}")
    print(f"{total:7.2%}  all, over {wall_s:.0f} s")


if __name__ == "__main__":
    main()
