"""A Redis or Valkey that may be slow or away: no call takes longer than its bound, and none raises for that."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import RedisClusterException, RedisError

from kv_transfer.redis_url import RedisKind, RedisUrl
from telemetry.logs import log_state

logger = logging.getLogger(__name__)

RECOVERY_TIMEOUT_S: Final = 1.0
FAILURES: Final = (RedisError, RedisClusterException, OSError, TimeoutError)  # the second is none of the first


class BoundedRedis:
    """Connects when first used.

    Args:
        url: as in redis_url.py. Of a Cluster, all keys of a script must have one hash tag.
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
        self.client = open_redis(RedisUrl.parse(url), connect_timeout_s)
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
        except FAILURES as error:
            self._on_failure()
            if self._recovery is None:
                reason = f"{type(error).__name__}: {error}"
                log_state(logger, logging.WARNING, redis=self._purpose, state="away", reason=reason)
                self._recovery = asyncio.create_task(self._recover())
            return None

    async def close(self) -> None:
        """Disconnect. Idempotent."""
        if self._recovery is not None:
            self._recovery.cancel()
        await close_redis(self.client)

    async def _recover(self) -> None:
        while True:
            await asyncio.sleep(self._backoff_s)
            with contextlib.suppress(*FAILURES):
                async with asyncio.timeout(RECOVERY_TIMEOUT_S):
                    await self.client.script_load(self._first_script)
                break
        log_state(logger, logging.WARNING, redis=self._purpose, state="back")
        self._recovery = None


async def redis_lack(url: str, timeout_s: float) -> str:
    """Why the server cannot be used now, without its password; empty when it can. url: as in redis_url.py."""
    client = open_redis(RedisUrl.parse(url), timeout_s)
    try:
        async with asyncio.timeout(timeout_s):
            await client.ping()
    except FAILURES as error:
        return str(error) or f"not within {timeout_s:g} s"
    finally:
        await close_redis(client)
    return ""


def open_redis(url: RedisUrl, connect_timeout_s: float) -> Redis | RedisCluster:
    """Connects when first used. Nothing is tried twice: within a call's bound there is no time for that."""
    options: dict[str, Any] = {"socket_connect_timeout": connect_timeout_s, "retry": Retry(NoBackoff(), 0)}
    if url.kind is RedisKind.SERVER:
        return Redis.from_url(url.text, **options)
    options |= {"username": url.username, "password": url.password}
    if url.tls:
        options |= {"ssl": True, "ssl_ca_certs": url.ca_file}
    if url.kind is RedisKind.CLUSTER:
        return RedisCluster(startup_nodes=[ClusterNode(host, port) for host, port in url.hosts], **options)
    sentinels: Any = Sentinel  # its constructor has no annotations
    primary: Redis = sentinels(url.hosts, sentinel_kwargs=options, **options).master_for(url.name, redis_class=Redis)
    return primary


async def close_redis(client: Redis | RedisCluster) -> None:
    """Disconnect. Idempotent."""
    await client.aclose()
    if isinstance(client, RedisCluster):  # which closes nothing once a call has failed
        await client.nodes_manager.aclose()
        await client.nodes_manager.aclose("startup_nodes")
    elif isinstance(client.connection_pool, SentinelConnectionPool):  # which nobody else closes
        for sentinel in client.connection_pool.sentinel_manager.sentinels:
            await sentinel.aclose()
