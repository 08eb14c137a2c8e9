"""Every death reaches every router, however often one is away, and a new router hears of the old deaths too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from cluster import death_notices
from cluster.death_notices import DeathNotices
from core.errors import Unreachable
from core.membership import WorkerRef

ONE, TWO = WorkerRef("decode-0", "a"), WorkerRef("decode-0", "b")


class Router:
    """`failures`: so many calls that get no answer. `hangs`: none does."""

    def __init__(self, failures: int = 0, hangs: bool = False) -> None:
        self.life = 1
        self.failures = failures
        self.hangs = hangs
        self.heard: asyncio.Queue[WorkerRef] = asyncio.Queue()

    async def called(self) -> None:
        if self.hangs:
            await asyncio.Event().wait()
        if self.failures:
            self.failures -= 1
            raise Unreachable("away")

    async def next(self) -> WorkerRef:
        async with asyncio.timeout(10):
            return await self.heard.get()


@pytest.fixture
async def routers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Router]:
    found = {"127.0.0.1:1": Router(failures=3), "127.0.0.1:2": Router(hangs=True), "127.0.0.1:3": Router()}

    async def fetch_status(address: str) -> Any:
        await found[address].called()
        return SimpleNamespace(router_id=f"{address} {found[address].life}")

    async def report_death(address: str, ref: WorkerRef) -> None:
        await found[address].called()
        found[address].heard.put_nowait(ref)

    monkeypatch.setattr(death_notices, "LOOK_EVERY_S", 0.001)
    monkeypatch.setattr(death_notices, "fetch_status", fetch_status)
    monkeypatch.setattr(death_notices, "report_death", report_death)
    return found


@pytest.fixture
async def notices(routers: dict[str, Router]) -> AsyncIterator[DeathNotices]:
    made = DeathNotices(list(routers))
    running = asyncio.create_task(made.run())
    yield made
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_death_is_told_until_it_is_heard_and_again_to_a_new_router(
    routers: dict[str, Router], notices: DeathNotices
) -> None:
    slow, hung, quick = routers.values()
    await notices.died(ONE)
    assert await quick.next() == ONE == await slow.next()
    await notices.died(TWO)
    assert await quick.next() == TWO == await slow.next()  # and not the one that is known
    slow.life += 1
    assert [await slow.next(), await slow.next()] == [ONE, TWO]
    assert quick.heard.empty() and hung.heard.empty()
