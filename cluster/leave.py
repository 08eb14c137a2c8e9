"""What a host does before it goes: the workers on it drain first, so that what they have goes on elsewhere.

1. Wait a moment. When the whole cluster ends, the controller has begun to drain everybody by then, and refuses.
2. Which workers listen at an address of this host, as the routers know them?
3. Ask the controller to drain each; who refuses, or is away, is asked again until the time is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final

from cluster.controller_client import drain_worker
from cluster.fleet import DrainRefused
from cluster.free_ports import can_listen
from cluster.status_client import fetch_all
from core.errors import Unreachable

RETRY_S: Final = 1.0

Ask = Callable[[], Awaitable[str]]  # what is left to do, as a text; empty when nothing is


async def leave(registries: Sequence[str], controller: str, after_s: float, within_s: float) -> str:
    """Ends when nothing here has work any more, or after `within_s`: then it returns why.

    after_s: how long to wait first. Raises: BadRequest: an address is no host:port.
    """
    deadline_s = asyncio.get_running_loop().time() + within_s
    await asyncio.sleep(min(after_s, within_s))

    async def ask() -> str:
        left_s = deadline_s - asyncio.get_running_loop().time()
        return await _drain_here(registries, controller, max(0.1, left_s - RETRY_S))

    return await keep_asking(ask, deadline_s)


async def keep_asking(ask: Ask, deadline_s: float, retry_s: float = RETRY_S) -> str:
    """Until it says that nothing is left, or the loop's clock shows `deadline_s`: then its last answer."""
    left = "not asked in time"
    with suppress(TimeoutError):
        async with asyncio.timeout_at(deadline_s):
            while True:
                left = await ask()
                if not left:
                    break
                await asyncio.sleep(retry_s)
    return left


async def _drain_here(registries: Sequence[str], controller: str, timeout_s: float) -> str:
    try:
        statuses = await fetch_all(registries)
        found = {
            item.worker.ref.worker_id
            for status in filter(None, statuses.values())
            for item in status.workers
            if is_own(item.worker.address)
        }
        for worker_id in sorted(found):
            await drain_worker(controller, worker_id, None, force=False, timeout_s=timeout_s)
    except (Unreachable, DrainRefused) as error:
        return str(error)
    return ""


def is_own(address: str) -> bool:
    """Whether host:port is of this host: nobody can listen at an address that another one has."""
    return can_listen(address.rpartition(":")[0].strip("[]"), 0)
