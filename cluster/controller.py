"""Keeps the wanted workers running: performs what the fleet decides, and tells it what happened.

One task per life of a worker: create the actor, start it, watch it. Each outcome goes through one inbox, so the fleet
sees one event after the other. A life that is over is buried (cluster/burial.py) and only then reported dead, because
from then on the blocks that it could still write are used again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final, assert_never

from cluster.burial import Bury, Location
from cluster.config import ClusterConfig
from cluster.fleet import DrainRefused, Fleet, RefusalReason
from cluster.fleet_events import (
    Effect,
    EndWorker,
    Event,
    ForgetWorker,
    StartFailed,
    StartWorker,
    StopAsked,
    SwitchRole,
    Wake,
    WakeAt,
    WorkerDied,
    WorkerStarted,
)
from cluster.ray_runtime import Actor, ActorFailed, ActorHung
from cluster.worker.config import WorkerConfig
from core.membership import Life, Role, WorkerInfo, WorkerRef
from telemetry.logs import log_state

logger = logging.getLogger(__name__)

PING_EVERY_S: Final = 2.0
STOP_TIMEOUT_S: Final = 5.0  # for closing servers, once drained
SWITCH_TIMEOUT_S: Final = 5.0  # of a worker that stands in for another role: then it is tried again
SWITCH_AGAIN_S: Final = 1.0

Spawn = Callable[[StartWorker], tuple[Actor, WorkerConfig]]  # a new process for this life, and what to tell it
Listener = Callable[[Event], None]
ReportDeath = Callable[[WorkerRef], Awaitable[None]]  # told once the process is certainly gone


class Controller:
    """Runs in the launcher's event loop: `run` until cancelled, `stop` first for a quiet end."""

    def __init__(
        self,
        fleet: Fleet,
        spawn: Spawn,
        config: ClusterConfig,
        listener: Listener,
        bury: Bury,
        report_death: ReportDeath,
    ) -> None:
        self._fleet = fleet
        self._spawn = spawn
        self._config = config
        self._listener = listener
        self._bury = bury
        self._report_death = report_death
        self._inbox: asyncio.Queue[Event] = asyncio.Queue()
        self._actors: dict[WorkerRef, Actor] = {}
        self._locations: dict[WorkerRef, Location] = {}
        self._lives = asyncio.TaskGroup()
        self._emptied = asyncio.Event()
        self._last_drain_s = config.drain_timeout_s

    @property
    def lives(self) -> dict[str, Life]:
        """Each wanted worker's, by worker id."""
        return self._fleet.lives

    @property
    def all_ready(self) -> bool:
        return all(life is Life.READY for life in self.lives.values())

    def adopt(self, actor: Actor, location: Location, info: WorkerInfo, *, stands_in: bool) -> bool:
        """Take over a living worker, before `run`. False: its place is taken, or not wanted."""
        adopted = self._fleet.adopt(info.ref, info.role, time.monotonic(), stands_in=stands_in)
        if adopted:
            self._actors[info.ref], self._locations[info.ref] = actor, location
        return adopted

    async def run(self) -> None:
        """Start all workers and keep them; never returns. An error that no worker explains ends it, and them."""
        self._inbox.put_nowait(Wake())
        async with self._lives:
            for ref, actor in self._actors.items():
                self._lives.create_task(self._watch(ref, actor))
            while True:
                event = await self._inbox.get()
                for effect in self._fleet.step(event, time.monotonic()):
                    self._perform(effect)
                if not self._actors:
                    self._emptied.set()
                self._listener(event)

    async def drain(self, worker_id: str, to: Role | None, *, force: bool, timeout_s: float) -> bool:
        """Let a worker drain, and then serve as `to`; None: as nothing, until it is asked to or ends. False: it does so
        already. A caller that leaves changes nothing.

        force: also the last decode worker. timeout_s: what is open after that keeps its role. Raises: DrainRefused.
        """
        if to is not None and self._fleet.serves_as(worker_id, to):
            return False
        ref = self._fleet.drain(worker_id, to, force=force)
        drain = self._drain_to(ref, to, timeout_s, stands_in=False)
        reason, message = await asyncio.shield(self._lives.create_task(drain))
        if reason is not None:
            raise DrainRefused(reason, message)
        return True

    async def _drain_to(
        self, ref: WorkerRef, to: Role | None, timeout_s: float, *, stands_in: bool
    ) -> tuple[RefusalReason | None, str]:
        """Until the worker says how it went, or is dead: a hung one is BUSY until then."""
        finish_s = min(self._config.drain_finish_s, timeout_s / 2)
        method, arguments = ("switch_role", (to, stands_in)) if to is not None else ("drain", ())
        call_s = timeout_s + self._config.heartbeat_timeout_s + STOP_TIMEOUT_S
        try:
            if ref not in self._actors:
                raise ActorFailed("it has died")
            left = await self._actors[ref].call(method, *arguments, timeout_s, finish_s, timeout_s=call_s)
        except ActorFailed as error:
            role = self._fleet.role_of(ref.worker_id)
            return RefusalReason.WORKER_LOST, f"{ref} was lost ({error}); its place starts again as {role}"
        self._fleet.drained(ref, to, done=not left)
        if left:
            return RefusalReason.NOT_DRAINED, f"{ref.worker_id}: {left}"
        return None, ""

    async def _switch(self, ref: WorkerRef, to: Role) -> None:
        reason, _message = await self._drain_to(ref, to, SWITCH_TIMEOUT_S, stands_in=to is Role.DECODE)
        if reason is not None:
            await asyncio.sleep(SWITCH_AGAIN_S)
        self._inbox.put_nowait(Wake())

    async def stop(self, drain_s: float) -> None:
        """Drain for so long, and end all workers; needs `run` to be running. Bounded: what is left is killed."""
        self._last_drain_s = drain_s
        self._emptied.clear()
        self._inbox.put_nowait(StopAsked())
        try:
            async with asyncio.timeout(drain_s + 2 * STOP_TIMEOUT_S):
                await self._emptied.wait()
        except TimeoutError:
            for actor in self._actors.values():
                actor.kill()

    def _perform(self, effect: Effect) -> None:
        match effect:
            case StartWorker(ref):
                # The process is made here and not in the task, so that a stop that comes next finds it.
                actor, config = self._spawn(effect)
                self._actors[ref] = actor
                self._lives.create_task(self._live(ref, actor, config))
            case SwitchRole(ref, to):
                log_state(
                    logger, worker_id=ref.worker_id, state="stands in" if to is Role.DECODE else "goes back", role=to
                )
                self._lives.create_task(self._switch(ref, to))
            case EndWorker(ref):
                self._lives.create_task(self._drain_and_end(self._actors[ref]))
            case ForgetWorker(ref):
                actor, location = self._actors.pop(ref), self._locations.pop(ref, None)
                actor.kill()  # a drained one for the second time: that finds nothing
                if location is not None:  # else it was never told to start
                    self._lives.create_task(self._end(ref, location))
            case WakeAt(at_s):
                # The loop's clock is time.monotonic.
                asyncio.get_running_loop().call_at(at_s, self._inbox.put_nowait, Wake())
            case _:
                assert_never(effect)

    async def _live(self, ref: WorkerRef, actor: Actor, config: WorkerConfig) -> None:
        """One life of one worker, from its process's birth to its end."""
        try:
            self._locations[ref] = await actor.call("locate", timeout_s=self._config.start_timeout_s)
            await actor.call("start", config, timeout_s=self._config.start_timeout_s)
        except ActorFailed as error:
            self._inbox.put_nowait(StartFailed(ref, str(error)))
            return
        self._inbox.put_nowait(WorkerStarted(ref))
        await self._watch(ref, actor)

    async def _watch(self, ref: WorkerRef, actor: Actor) -> None:
        self._inbox.put_nowait(WorkerDied(ref, await watch(actor, self._config.heartbeat_timeout_s)))

    async def _end(self, ref: WorkerRef, location: Location) -> None:
        """Nothing is reported before it is true."""
        await self._bury(ref, location)
        await self._report_death(ref)

    async def _drain_and_end(self, actor: Actor) -> None:
        """Let it finish, close it, end its process: its `_watch` then reports the end."""
        drain_s, finish_s = self._last_drain_s, self._config.drain_finish_s
        with contextlib.suppress(ActorFailed):  # it ends below in any case
            await actor.call("drain", drain_s, finish_s, timeout_s=drain_s + 1.0)
            await actor.call("stop", timeout_s=STOP_TIMEOUT_S)
        actor.kill()


async def watch(actor: Actor, heartbeat_timeout_s: float) -> str:
    """Why a process is gone, once it is. Ray sees a dead one; only a ping sees a hung one."""
    death = asyncio.create_task(actor.call("watch", timeout_s=None))
    try:
        while True:
            done, _ = await asyncio.wait({death}, timeout=PING_EVERY_S)
            if done:
                error = death.exception()
                return str(error) if error else "its watch ended"
            await actor.call("ping", timeout_s=heartbeat_timeout_s)
    except ActorHung as error:
        return f"hung: {error}"
    except ActorFailed as error:
        return str(error)
    finally:
        death.cancel()
        await asyncio.gather(death, return_exceptions=True)
