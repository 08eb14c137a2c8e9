"""Where the routers of a cluster are: host:port each, or a name that resolves to several, which come and go."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Final

from core.errors import BadRequest

LOOK_UP_EVERY_S: Final = 5.0  # what Kubernetes' DNS lets its answers be kept for
LOOK_UP_TIMEOUT_S: Final = 5.0


async def look_up(name: str) -> frozenset[str]:
    """The addresses behind one host:port, IPv6 where there is no IPv4: one router, seen by both, must not count twice.

    Raises: OSError, TimeoutError: the name has no address, or nobody says. BadRequest: it is no host:port.
    """
    host, _, port = name.rpartition(":")
    if not host or not port.isdecimal():
        raise BadRequest("registry", f"must be host:port, got {name!r}")
    async with asyncio.timeout(LOOK_UP_TIMEOUT_S):
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    by_family = {family: [f"{item[4][0]}" for item in found if item[0] == family] for family, *_ in found}
    if socket.AF_INET in by_family:
        return frozenset(f"{address}:{port}" for address in by_family[socket.AF_INET])
    return frozenset(f"[{address}]:{port}" for address in by_family[socket.AF_INET6])


async def with_each_router(names: Sequence[str], work: Callable[[str], Coroutine[Any, Any, None]]) -> None:
    """Run `work(address)` for every router for as long as it is there, each in a task of its own; until cancelled.

    A name that cannot be resolved keeps the addresses that it had. An error of `work` ends this.
    """
    known: dict[str, frozenset[str]] = dict.fromkeys(names, frozenset())
    tasks: dict[str, asyncio.Task[None]] = {}
    async with asyncio.TaskGroup() as group:
        while True:
            for name in names:
                with suppress(OSError, TimeoutError):
                    known[name] = await look_up(name)
            addresses = frozenset().union(*known.values())
            for address in tasks.keys() - addresses:
                tasks.pop(address).cancel()
            for address in sorted(addresses - tasks.keys()):
                tasks[address] = group.create_task(work(address))
            await asyncio.sleep(LOOK_UP_EVERY_S)
