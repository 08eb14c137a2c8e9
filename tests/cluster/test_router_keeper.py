"""How a router's process is ended."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cluster.config import ClusterConfig
from cluster.ray_runtime import ActorFailed, ActorHung
from cluster.router_keeper import RouterKeeper


class Router:
    """An actor that starts, and whose `stop` ends so."""

    def __init__(self, stopped: Exception | None) -> None:
        self.killed = False
        self._stopped = stopped

    async def call(self, method: str, *_arguments: Any, timeout_s: float | None) -> None:
        assert timeout_s is not None or method == "watch"
        if method == "watch":
            await asyncio.Event().wait()
        if method == "stop" and self._stopped is not None:
            raise self._stopped

    def kill(self) -> None:
        self.killed = True


@pytest.mark.parametrize(
    ("stopped", "said"),
    [
        (None, []),
        (ActorFailed("its process ended"), []),
        (ActorHung("no answer for 10 s"), ["router is hung (no answer for 10 s), killing it"]),
    ],
)
async def test_a_router_that_hangs_while_it_drains_is_named_and_killed(
    stopped: Exception | None, said: list[str], tmp_path: Path
) -> None:
    actor: Any = Router(stopped)
    lines: list[str] = []
    keeper = RouterKeeper("router", lambda: (actor, None), ClusterConfig(tmp_path), lines.append)
    keeping = asyncio.create_task(keeper.run())
    async with asyncio.timeout(5):
        await keeper.started.wait()
    keeping.cancel()
    await asyncio.wait([keeping])
    await keeper.stop()
    assert lines == said and actor.killed
