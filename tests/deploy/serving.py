"""An aiohttp application in a thread of its own, for clients that block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from aiohttp import web

START_TIMEOUT_S: Final = 30.0


@contextmanager
def serving(make_app: Callable[[], web.Application]) -> Iterator[int]:
    """Serve it on a free loopback port, which this gives."""
    ports: list[int] = []
    ready, stop = threading.Event(), threading.Event()

    async def serve() -> None:
        runner = web.AppRunner(make_app())
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        ports.append(runner.addresses[0][1])
        ready.set()
        await asyncio.to_thread(stop.wait)
        await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="serving")
    thread.start()
    try:
        assert ready.wait(START_TIMEOUT_S)
        yield ports[0]
    finally:
        stop.set()
        thread.join(START_TIMEOUT_S)
