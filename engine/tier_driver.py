"""Reads and writes the disk tier: one block at a time, in a thread, so that no step and no request waits for it.

The bytes on their way are in memory of their own: a host slot is copied before its write begins, and filled after its
read has ended, both in the event loop, which alone knows the slots.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from engine.cache_tiers import CacheTiers, DiskRead, DiskWrite
from engine.disk_slots import DiskSlots
from engine.host_slots import HostSlots
from telemetry.logs import log_state

TIMEOUT_S: Final = 5.0  # of one block
READING_BOUND_S: Final = 2.0  # of blocks read one after another: to compute what still waits is soon quicker

Result = TypeVar("Result")

logger = logging.getLogger(__name__)


class TierDriver:
    """Owns the disk's thread. A disk that fails or hangs is left alone from then on: its blocks are lost, no request.

    on_read: told when blocks may have come that requests wait for.
    """

    def __init__(
        self,
        tiers: CacheTiers,
        host: HostSlots,
        disk: DiskSlots,
        on_read: Callable[[], None],
        timeout_s: float = TIMEOUT_S,
        reading_bound_s: float = READING_BOUND_S,
    ) -> None:
        self._tiers = tiers
        self._host = host
        self._disk = disk
        self._on_read = on_read
        self._timeout_s = timeout_s
        self._reading_bound_s = reading_bound_s
        self._transit = memoryview(bytearray(host.slot_bytes))
        self._work = asyncio.Event()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cache-disk")
        self._task: asyncio.Task[None] | None = None
        tiers.on_work = self._work.set

    def start(self) -> asyncio.Task[None]:
        """Begin. The task ends when the disk has failed, or by `stop`."""
        self._task = asyncio.get_running_loop().create_task(self._run())
        return self._task

    async def stop(self) -> None:
        """End, and give the file's room back unless the disk hangs. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        with contextlib.suppress(TimeoutError):  # the process's end closes the file then
            async with asyncio.timeout(self._timeout_s):
                await asyncio.to_thread(self._thread.shutdown)
            self._disk.close()

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        reading_until_s = clock() + self._reading_bound_s
        while True:
            io = self._tiers.next_io()
            if isinstance(io, DiskRead) and clock() > reading_until_s:
                self._tiers.give_up_reads()
                self._on_read()
                continue
            if io is None:
                self._work.clear()
                await self._work.wait()
            if not isinstance(io, DiskRead):
                reading_until_s = clock() + self._reading_bound_s
            if io is None:
                continue
            try:
                await self._perform(io)
            except OSError as error:  # so is TimeoutError
                self._tiers.lose_disk()
                self._on_read()
                log_state(logger, logging.ERROR, state="disk_cache_lost", error=repr(error))
                return

    async def _perform(self, io: DiskRead | DiskWrite) -> None:
        if isinstance(io, DiskWrite):
            self._transit[:] = self._host.bytes_of(io.host_slot)
            await self._in_thread(self._disk.write, io.slot)
            self._tiers.written(io)
            return
        intact = await self._in_thread(self._disk.read, io.slot)
        slot = self._tiers.was_read(io, intact=intact)
        if slot is not None:
            self._host.bytes_of(slot)[:] = self._transit
        self._on_read()

    async def _in_thread(self, operation: Callable[[int, memoryview], Result], slot: int) -> Result:
        """Raises: TimeoutError: the disk hangs, which a loop that stood still meanwhile does not make of it."""
        done = asyncio.get_running_loop().run_in_executor(self._thread, operation, slot, self._transit)
        await asyncio.wait([done], timeout=self._timeout_s)
        if not done.done():
            raise TimeoutError
        return done.result()
