"""A Redis or Valkey that may be slow or away: no call takes longer than its bound, and none raises for that."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

logger = logging.getLogger(__name__)

RECOVERY_TIMEOUT_S: Final = 1.0


class BoundedRedis:
    """Connects when first used.

    Args:
        url: `redis://host:port/db`.
        purpose: what it is for, in logs.
        first_script: what a server that is back must have: the script that requests wait for.
        connect_timeout_s: bound of making a connection.
        backoff_s: after a failure calls end at once; the server is tried again at this period, in the background.
        on_failure: a call failed or took too long.
    """

    def __init__(
        self,
        url: str,
        purpose: str,
        first_script: str,
        connect_timeout_s: float,
        backoff_s: float,
        on_failure: Callable[[], None],
    ) -> None:
        # No retries: within a call's bound there is no time for them, and recovery is done by `_recover`.
        self.client = Redis.from_url(url, socket_connect_timeout=connect_timeout_s, retry=Retry(NoBackoff(), 0))
        self._on_failure = on_failure
        self._purpose = purpose
        self._first_script = first_script
        self._backoff_s = backoff_s
        self._recovery: asyncio.Task[None] | None = None

    @property
    def away(self) -> bool:
        """Whether the server failed a call and has not answered since."""
        return self._recovery is not None

    async def bounded(self, timeout_s: float, call: Callable[[], Awaitable[Any]]) -> Any:
        """The call's answer, or None: the server is away, failed it or took too long."""
        if self.away:
            return None
        try:
            async with asyncio.timeout(timeout_s):
                return await call()
        except (RedisError, OSError, TimeoutError) as error:
            self._on_failure()
            if self._recovery is None:
                logger.warning("%s away: %s: %s", self._purpose, type(error).__name__, error)
                self._recovery = asyncio.create_task(self._recover())
            return None

    async def close(self) -> None:
        """Disconnect. Idempotent."""
        if self._recovery is not None:
            self._recovery.cancel()
        await self.client.aclose()

    async def _recover(self) -> None:
        while True:
            await asyncio.sleep(self._backoff_s)
            with contextlib.suppress(RedisError, OSError, TimeoutError):
                async with asyncio.timeout(RECOVERY_TIMEOUT_S):
                    await self.client.script_load(self._first_script)
                break
        logger.warning("%s is back", self._purpose)
        self._recovery = None
