"""Every router hears of every death: until it does, blocks that the dead could still write stay locked."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from cluster.routers import with_each_router
from cluster.status_client import fetch_status, report_death
from core.errors import Unreachable
from core.membership import WorkerRef

LOOK_EVERY_S: Final = 1.0
MAX_REMEMBERED: Final = 1024  # a router that starts anew is told this many last deaths


class DeathNotices:
    """`routers`: their registries, as cluster.routers takes them. `run` until cancelled."""

    def __init__(self, routers: Sequence[str]) -> None:
        self._routers = routers
        self._deaths: deque[WorkerRef] = deque(maxlen=MAX_REMEMBERED)
        self._wakes: set[asyncio.Event] = set()

    async def died(self, ref: WorkerRef) -> None:
        """The process of this life has certainly ended."""
        self._deaths.append(ref)
        for wake in self._wakes:
            wake.set()

    async def run(self) -> None:
        """Tell each router what it does not know yet, as often as it takes; one that is away holds up no other."""
        await with_each_router(self._routers, self._tell)

    async def _tell(self, address: str) -> None:
        wake = asyncio.Event()
        self._wakes.add(wake)
        router_id, known = "", set[WorkerRef]()
        try:
            while True:
                wake.clear()
                with suppress(Unreachable):
                    status = await fetch_status(address)
                    if status.router_id != router_id:  # it started anew, and knows of no death
                        router_id, known = status.router_id, set()
                    known &= set(self._deaths)
                    for ref in [ref for ref in self._deaths if ref not in known]:
                        await report_death(address, ref)
                        known.add(ref)
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY_S):
                        await wake.wait()
        finally:
            self._wakes.discard(wake)
