"""Lines that say what `tandem up` is at, each with the seconds since its start."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, TextIO

STILL_EVERY_S: Final = 5.0


class Progress:
    """Writes to `stream`, flushed line by line: the reader may be a pipe."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._started_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def say(self, text: str) -> None:
        """One line with the elapsed time."""
        self.plain(f"[{self.elapsed_s:5.1f} s] {text}")

    def plain(self, text: str) -> None:
        """One line as it is. A reader that has gone (closed pipe) is no reason to stop serving."""
        with contextlib.suppress(OSError):
            print(text, file=self._stream, flush=True)

    @asynccontextmanager
    async def step(self, text: str) -> AsyncIterator[None]:
        """Says the step, says again that it goes on when it takes long."""
        self.say(text)
        reminder = asyncio.create_task(self._remind(text))
        try:
            yield
        finally:
            reminder.cancel()

    async def _remind(self, text: str) -> None:
        while True:
            await asyncio.sleep(STILL_EVERY_S)
            self.say(f"  still {text}")
