"""Background tasks that cannot die unseen, and the end of a process that is broken."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine
from typing import Any, Final, NoReturn

from telemetry.logs import log_state

logger = logging.getLogger(__name__)

EXIT_INVARIANT_BROKEN: Final = 70  # EX_SOFTWARE of sysexits.h

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class BackgroundTasks:
    """Tasks that nobody awaits. `on_broken` hears of every error that ends one: nobody else could act on it."""

    def __init__(self, on_broken: Callable[[BaseException], None]) -> None:
        self._on_broken = on_broken
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` in the running loop."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.watch(task)
        return task

    def watch(self, task: asyncio.Task[None]) -> None:
        """Hear of the error that ends a task which somebody else cancels."""
        task.add_done_callback(self._ended)

    async def settle(self, timeout_s: float) -> None:
        """Wait until what runs now has ended, or for `timeout_s`."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)

    def cancel(self) -> None:
        """Ask every task to end."""
        for task in self._tasks:
            task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_broken(error)


def end_broken(error: BaseException, **fields: object) -> NoReturn:
    """End by an error that nobody can act on; the log has its traceback."""
    logger.critical("not expected", exc_info=error)
    end_process(EXIT_INVARIANT_BROKEN, str(error), **fields)


def end_process(exit_code: int, reason: str, **fields: object) -> NoReturn:
    """Say why, and end at once, without cleaning up: a state that must not exist is not to be saved or sent."""
    log_state(logger, logging.CRITICAL, **fields, state="gone", exit_code=exit_code, reason=reason)
    logging.shutdown()
    os._exit(exit_code)
