"""Every death reaches the router, however often it is away, and a new router hears of the old deaths too."""

from __future__ import annotations

import asyncio

from cluster.death_notices import DeathNotices
from cluster.status_client import RouterUnreachable
from core.membership import WorkerRef

ONE, TWO = WorkerRef("decode-0", "a"), WorkerRef("decode-0", "b")


class Router:
    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.heard: asyncio.Queue[WorkerRef] = asyncio.Queue()

    async def report(self, ref: WorkerRef) -> None:
        if self.failures:
            self.failures -= 1
            raise RouterUnreachable("away")
        self.heard.put_nowait(ref)


async def test_a_death_is_told_until_it_is_heard_and_again_to_a_new_router(monkeypatch) -> None:
    monkeypatch.setattr("cluster.death_notices.RETRY_S", 0.0)
    router = Router(failures=3)
    notices = DeathNotices(router.report)
    running = asyncio.create_task(notices.run())
    async with asyncio.timeout(10):
        await notices.died(ONE)
        assert await router.heard.get() == ONE
        await notices.died(TWO)
        assert await router.heard.get() == TWO  # and not the one that is known
        notices.router_started()
        assert [await router.heard.get(), await router.heard.get()] == [ONE, TWO]
    assert router.heard.empty()
    running.cancel()
