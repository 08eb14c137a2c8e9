"""Sees to it that nothing outlives `tandem up`, however it ends.

1. Fork, before anything heavy is imported: the child does the work, this process only waits.
2. Signals to us go on to the child; if we are killed, the child is told to stop and ends in order.
3. When the child has ended, in order or by SIGKILL, what it left below us is killed: Ray's own agents would notice the
   end of a killed launcher only after a minute.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Final

from cluster import processes

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
EXIT_TIMEOUT_S: Final = 5.0


def supervise(work: Callable[[], int]) -> int:
    """Exit code of `work`, run in a child process; 128 + N when signal N killed it. Call it with one thread only.

    In the child this returns, or raises, what `work` does.
    """
    processes.adopt_orphans()
    supervisor = os.getpid()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        processes.die_with_parent(signal.SIGTERM)
        if os.getppid() != supervisor:
            return 128 + signal.SIGTERM
        return work()

    def pass_on(number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(child, number)

    for number in SIGNALS:
        signal.signal(number, pass_on)
    _, status = os.waitpid(child, 0)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    asyncio.run(_kill_left())
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def run_until_signal(work: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Run `work`, whose event is set by the first of SIGNALS; more of them change nothing."""

    async def run() -> None:
        stop = asyncio.Event()
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await work(stop)

    try:
        asyncio.run(run())
    finally:
        # Everything is down: another Ctrl-C has nothing to break but the interpreter's own end.
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)


async def _kill_left() -> None:
    left = processes.descendants(os.getpid())
    for process in left:
        processes.kill(process)
    await processes.wait_gone(left, EXIT_TIMEOUT_S)
