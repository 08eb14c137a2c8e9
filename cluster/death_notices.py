"""The router hears of every death: until it does, blocks that the dead could still write stay locked."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

from cluster.status_client import RouterUnreachable
from core.membership import WorkerRef

RETRY_S: Final = 0.5
MAX_REMEMBERED: Final = 1024  # a router that starts anew is told this many last deaths


class DeathNotices:
    """`run` until cancelled. `report` raises RouterUnreachable when the router did not take the notice."""

    def __init__(self, report: Callable[[WorkerRef], Awaitable[None]]) -> None:
        self._report = report
        self._deaths: deque[WorkerRef] = deque(maxlen=MAX_REMEMBERED)
        self._known: set[WorkerRef] = set()  # to this life of the router
        self._wake = asyncio.Event()

    async def died(self, ref: WorkerRef) -> None:
        """The process of this life has certainly ended."""
        self._deaths.append(ref)
        self._wake.set()

    def router_started(self) -> None:
        """A new router knows of no death."""
        self._known = set()
        self._wake.set()

    async def run(self) -> None:
        """Tell what is not known yet, as often as it takes."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            known = self._known
            for ref in [ref for ref in self._deaths if ref not in known]:
                try:
                    await self._report(ref)
                except RouterUnreachable:
                    await asyncio.sleep(RETRY_S)
                    self._wake.set()
                else:
                    known.add(ref)
