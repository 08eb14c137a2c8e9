"""When a worker's process has certainly ended: from then on the blocks that it could still write are used again.

On our own host /proc says so. On another host we ask there, by a task that Ray runs on that very host. When Ray has
lost that host nobody can look: its worker may be cut off, alive, with a write on its way. What bounds such a write is
its TCP connection. The kernel of the side that opened it gives it up after 16 s without a sign of the other (UCX's
keep-alive) or 20 s with data under way (UCX_TCP_USER_TIMEOUT), even while its process is frozen, and then
the other side's data is refused; a new connection takes a handshake. A worker whose network works is known to a
router. So it is dead once Ray has lost its host and no router has known it for UNHEARD_S without a gap.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from cluster import processes
from cluster.processes import Process
from cluster.ray_runtime import ActorFailed, RayRuntime
from cluster.routers import look_up
from cluster.status_client import fetch_status
from core.errors import Unreachable
from core.membership import WorkerRef
from kv_transfer.membership_codec import decode_ref

KILL_TIMEOUT_S: Final = 2.0
ASK_TIMEOUT_S: Final = 10.0
ASK_EVERY_S: Final = 1.0
UNHEARD_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Location:
    """Where a worker's process is, or was."""

    host: str  # Ray's id of it
    process: Process


Bury = Callable[[WorkerRef, Location], Awaitable[None]]  # returns once that life can write no more


async def bury_here(_ref: WorkerRef, location: Location) -> None:
    """On this host. Ray's kill may be lost with Ray's own trouble; ours cannot."""
    await _end(location.process)


class HostBurial:
    """On any host of a Ray that was joined. `routers`: their registries, as cluster.routers takes them."""

    def __init__(self, ray: RayRuntime, routers: Sequence[str]) -> None:
        self._ray = ray
        self._routers = routers

    async def bury(self, ref: WorkerRef, location: Location) -> None:
        """Ends it where it is, or waits until a host that is lost can be no danger any more."""
        while True:
            try:
                await self._ray.run_on(location.host, _end_there, location.process, timeout_s=ASK_TIMEOUT_S)
                return
            except ActorFailed:
                if not await self._ray.is_alive(location.host):
                    break
            await asyncio.sleep(ASK_EVERY_S)
        await self._unheard(ref)

    async def _unheard(self, ref: WorkerRef) -> None:
        heard_s = time.monotonic()
        while time.monotonic() - heard_s < UNHEARD_S:
            if await self._may_be_heard(ref):
                heard_s = time.monotonic()
            await asyncio.sleep(ASK_EVERY_S)

    async def _may_be_heard(self, ref: WorkerRef) -> bool:
        """Whether a router is linked to this life; while one does not answer, it may be."""
        try:
            addresses = [address for name in self._routers for address in await look_up(name)]
            statuses = [await fetch_status(address) for address in addresses]
        except (Unreachable, OSError, TimeoutError):
            return True
        return any(decode_ref(item.worker.ref) == ref for status in statuses for item in status.workers)


def _end_there(process: Process) -> None:
    asyncio.run(_end(process))


async def _end(process: Process) -> None:
    """Kill it; returns when it is gone."""
    left = {process}
    while left:
        processes.kill(process)
        left = await processes.wait_gone(left, KILL_TIMEOUT_S)
