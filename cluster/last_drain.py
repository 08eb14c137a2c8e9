"""How a cluster's requests end when it is stopped: what is open may finish, within one bound for all.

Routers come first, while their workers serve as before. When they have gone, no worker has anything of theirs, and what
is left of the time is for hand-offs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, Final

from cluster.progress import STILL_EVERY_S, Progress
from cluster.status_client import fetch_all
from core.errors import Unreachable

LEAST_S: Final = 1.0  # of workers, whose hand-offs end by themselves


async def drain_all(
    stopping_routers: Iterable[Awaitable[None]],
    stop_workers: Callable[[float], Awaitable[None]],
    telling: Coroutine[Any, Any, None],
    drain_timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """stopping_routers: each takes nothing new, lets what is open finish for `drain_timeout_s`, and ends. stop_workers:
    lets them drain for so many seconds, and ends them. telling: runs until the routers have ended."""
    over_s = clock() + drain_timeout_s
    told = asyncio.create_task(telling)
    try:
        await asyncio.gather(*stopping_routers)
    finally:
        told.cancel()
    await stop_workers(max(LEAST_S, over_s - clock()))


async def tell_open_requests(progress: Progress, registry_addresses: Sequence[str], drain_timeout_s: float) -> None:
    """For how many requests the end waits: said at once, and again while it does."""
    end_s = progress.elapsed_s + drain_timeout_s
    while num_open := await _num_open(registry_addresses):
        requests = "1 open request" if num_open == 1 else f"{num_open} open requests"
        progress.say(f"waiting for {requests}, {max(0.0, end_s - progress.elapsed_s):.0f} s at most")
        await asyncio.sleep(STILL_EVERY_S)


async def _num_open(registry_addresses: Sequence[str]) -> int:
    try:
        statuses = await fetch_all(registry_addresses)
    except Unreachable:  # they have gone
        return 0
    return sum(status.open_requests for status in statuses.values() if status is not None)
