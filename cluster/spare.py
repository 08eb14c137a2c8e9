"""A worker process that has imported everything and waits for its part: what replaces a dead worker begins there.

Imports are two thirds of the CPU time that a worker takes to start, and that time a stream stands still when no other
worker is left. A spare holds no weights and no KV, and is of no role.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from cluster.controller import watch
from cluster.ray_runtime import Actor, ActorFailed


class SpareWorker:
    """At most one. create: a new process that is told nothing yet. All in one event loop."""

    def __init__(self, create: Callable[[], Actor], prepare_timeout_s: float, heartbeat_timeout_s: float) -> None:
        self._create = create
        self._prepare_timeout_s = prepare_timeout_s
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._actor: Actor | None = None
        self._tending: asyncio.Task[None] | None = None

    @property
    def is_there(self) -> bool:
        return self._actor is not None

    def refill(self) -> None:
        """Have one, from soon on."""
        if not self.is_there:
            self._actor = self._create()
            self._tending = asyncio.create_task(self._tend(self._actor))

    def take(self) -> Actor:
        """The spare, as far as it has come, or a new process."""
        actor = self._actor or self._create()
        self.let_go()
        return actor

    def let_go(self) -> None:
        """It is no spare any more."""
        self._actor = None
        if self._tending is not None:
            self._tending.cancel()

    async def _tend(self, actor: Actor) -> None:
        """One that dies, hangs, or cannot import what it must, is no spare."""
        with suppress(ActorFailed):
            await actor.call("prepare", timeout_s=self._prepare_timeout_s)
            await watch(actor, self._heartbeat_timeout_s)
        actor.kill()
        self._actor = None
