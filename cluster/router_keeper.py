"""Keeps a router running: its process is replaced on the same ports when it dies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from cluster.backoff import Backoff
from cluster.config import ClusterConfig
from cluster.controller import STOP_TIMEOUT_S, watch
from cluster.ray_runtime import Actor, ActorFailed, ActorHung
from core.errors import CommandFailed

SpawnRouter = Callable[[], tuple[Actor, Any]]  # a new process, and what to tell it


class RouterKeeper:
    """`run` until cancelled; `started` is set once the router has been up."""

    def __init__(self, name: str, spawn: SpawnRouter, config: ClusterConfig, say: Callable[[str], None]) -> None:
        self._name = name
        self._spawn = spawn
        self._config = config
        self._say = say
        self._actor: Actor | None = None
        self.started = asyncio.Event()

    async def run(self) -> None:
        """Start the router and keep it. Raises: the actor's error, when the very first start fails."""
        backoff = Backoff()
        while True:
            reason, up_s = await self._live()
            self._say(f"{self._name} died ({reason}), replacing it")
            await asyncio.sleep(backoff.died(up_s))

    async def stop(self) -> None:
        """Let what is open finish, close the fronts and end the process; call it after `run` was cancelled."""
        if self._actor is None:
            return
        try:
            await self._actor.call("stop", timeout_s=self._config.drain_timeout_s + STOP_TIMEOUT_S)
        except ActorHung as error:
            self._say(f"{self._name} is hung ({error}), killing it")
        except ActorFailed:
            pass  # it has ended, or does below
        self._actor.kill()

    async def _live(self) -> tuple[str, float]:
        """One life; returns why it ended, and for how many seconds it was up."""
        self._actor, config = self._spawn()
        try:
            await self._actor.call("start", config, timeout_s=self._config.start_timeout_s)
        except ActorFailed as error:
            self._actor.kill()
            if not self.started.is_set():
                raise CommandFailed(f"{self._name} did not start: {error}") from error
            return str(error), 0.0
        self.started.set()
        ready_s = time.monotonic()
        reason = await watch(self._actor, self._config.heartbeat_timeout_s)
        self._actor.kill()
        return reason, time.monotonic() - ready_s
