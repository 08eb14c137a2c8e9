"""No background task dies unseen."""

from __future__ import annotations

import asyncio

from telemetry.tasks import BackgroundTasks


async def _fail() -> None:
    raise KeyError("lost")


async def test_an_error_reaches_who_can_end_the_process() -> None:
    errors: list[BaseException] = []
    tasks = BackgroundTasks(errors.append)
    tasks.spawn(_fail())
    await tasks.settle(timeout_s=5.0)
    await asyncio.sleep(0)
    assert [type(error) for error in errors] == [KeyError]


async def test_a_watched_task_is_not_cancelled_with_the_others() -> None:
    errors: list[BaseException] = []
    tasks = BackgroundTasks(errors.append)
    watched, spawned = asyncio.create_task(_forever()), tasks.spawn(_forever())
    tasks.watch(watched)
    tasks.cancel()
    await tasks.settle(timeout_s=5.0)
    assert (spawned.cancelled(), watched.done(), errors) == (True, False, [])
    watched.cancel()


async def _forever() -> None:
    await asyncio.Event().wait()
