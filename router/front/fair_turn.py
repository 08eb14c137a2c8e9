"""One thing that one caller has at a time; those who wait get it by tenants in turn, each tenant's in order of arrival.

A tenant that asks often waits for itself: each other one is before its next but one. Of one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairTurn:
    """Nobody has it at first."""

    def __init__(self) -> None:
        self._taken = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by tenant; the first one's turn is next

    @asynccontextmanager
    async def of(self, tenant: str) -> AsyncIterator[None]:
        await self._take(tenant)
        try:
            yield
        finally:
            self._pass_on()

    async def _take(self, tenant: str) -> None:
        if not self._taken:
            self._taken = True
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_on()  # it came as its caller left
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            tenant, turns = next(iter(self._waiting.items()))
            del self._waiting[tenant]
            turn = turns.popleft()
            if turns:
                self._waiting[tenant] = turns  # at the ring's end
            if not turn.done():  # its caller waits still
                turn.set_result(None)
                return
        self._taken = False
