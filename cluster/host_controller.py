"""Keeps the workers of a cluster on several hosts: the controller of cluster/controller.py over a Ray that it joins.

1. Answer probes; join Ray; take over the workers that an earlier controller left and that are what we would start; end
   the others. What ended while nobody watched is buried and reported too.
2. Start each wanted worker on a host that has its role's custom resource free, and replace what dies. A host that is
   not there yet, or not any more, shows as a worker that does not start: it is tried again.
3. Tell every router who died; a router that starts anew hears of the old deaths too.
4. Stop: drain the workers, end them, leave Ray; or leave them to the next controller (`keep_workers`).
"""

from __future__ import annotations

import asyncio
import pickle
from collections import deque
from dataclasses import replace
from random import SystemRandom
from typing import Final

from aiohttp import web

from cluster.actors import ProcessPaths, ServingWorker, WorkerActor
from cluster.burial import HostBurial
from cluster.config import ClusterConfig, worker_config
from cluster.controller import Controller
from cluster.controller_service import listen_controller
from cluster.death_notices import DeathNotices
from cluster.fleet import Fleet
from cluster.fleet_events import Event, StartFailed, StartWorker, WorkerDied, WorkerStarted
from cluster.progress import Progress
from cluster.ray_runtime import STOP_TIMEOUT_S, Actor, ActorFailed, RayRuntime
from cluster.worker.config import WorkerConfig
from core.errors import BadRequest
from core.membership import Role, WorkerRef

RESOURCES: Final = {Role.PREFILL: "tandem_prefill", Role.DECODE: "tandem_decode"}
LOCATE_TIMEOUT_S: Final = 10.0
BURIED: Final = b"buried"  # the note on a worker that has certainly ended; before, it says where it is
MAX_DEAD: Final = 100  # notes that stay


class HostController:
    """Make one per run."""

    def __init__(self, config: ClusterConfig, progress: Progress, paths: ProcessPaths | None = None) -> None:
        self._config = config
        self._progress = progress
        self._paths = paths or ProcessPaths()
        self._ray = RayRuntime.joined(config.ray_address)
        self._burial = HostBurial(self._ray, config.registry_addresses)
        self._deaths = DeathNotices(config.registry_addresses)
        fleet = Fleet(config.roles, SystemRandom(), stand_in=config.stand_in)
        self._controller = Controller(fleet, self._spawn, config, self._heard, self._burial.bury, self._died)
        self._dead: deque[WorkerRef] = deque()
        self._keeping = False
        self._stopping = False

    async def run(self, stop: asyncio.Event) -> None:
        """All of it, until `stop` is set. Raises: BadRequest, CommandFailed, or the error that ended it."""
        probes = await self._answer_probes()
        service = await listen_controller(self._controller, self._config)
        working, stopping = asyncio.create_task(self._work()), asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
            self._stopping = True
            if self._keeping and not self._config.keep_workers:
                async with self._progress.step("draining the workers"):
                    await self._controller.stop(self._config.drain_timeout_s)
        finally:
            working.cancel()
            stopping.cancel()
            await asyncio.gather(working, stopping, return_exceptions=True)
            await self._ray.stop(STOP_TIMEOUT_S)
            await service.stop(grace=None)
            await probes.cleanup()
        self._progress.say("stopped")

    async def _work(self) -> None:
        async with self._progress.step(f"joining Ray at {self._config.ray_address}"):
            await self._ray.start(self._config.start_timeout_s)
        notes = {WorkerRef.parse(name): note for name, note in self._ray.notes().items()}
        leftovers = {WorkerRef.parse(name): actor for name, actor in self._ray.actors().items()}
        adopted = await asyncio.gather(*(self._adopt(ref, actor) for ref, actor in leftovers.items()))
        kept = {ref for ref, is_adopted in zip(leftovers, adopted, strict=True) if is_adopted}
        async with asyncio.TaskGroup() as works:
            for work in (self._controller.run(), self._deaths.run()):
                works.create_task(work)
            for ref in (leftovers.keys() | notes.keys()) - kept:
                works.create_task(self._end_leftover(ref, leftovers.get(ref), notes.get(ref)))
            self._keeping = True

    async def _adopt(self, ref: WorkerRef, actor: Actor) -> bool:
        """Take over a worker that serves as one of ours would."""
        role = self._config.roles.get(ref.worker_id)
        if role is None:
            return False
        try:
            found: ServingWorker | None = await actor.call("describe", timeout_s=LOCATE_TIMEOUT_S)
            location = await actor.call("locate", timeout_s=LOCATE_TIMEOUT_S)
        except ActorFailed:
            return False
        if found is None or not self._is_wanted(found, ref, role):
            return False
        if not self._controller.adopt(actor, location, found.info, stands_in=found.stands_in):
            return False
        self._progress.say(f"{ref} is of an earlier controller: taken over")
        return True

    def _is_wanted(self, found: ServingWorker, ref: WorkerRef, role: Role) -> bool:
        try:
            wanted = ServingWorker(self._worker_config(ref, role), found.info, stands_in=found.stands_in)
            return replace(found, config=replace(found.config, role=role)) == wanted
        except AttributeError:  # of an earlier release, which had not all fields of these
            return False

    async def _end_leftover(self, ref: WorkerRef, actor: Actor | None, note: bytes | None) -> None:
        """What has no note was not located yet, so it was never told to start."""
        if actor is not None:
            self._progress.say(f"{ref} is of an earlier controller: ending it")
            actor.kill()
        if note is None:
            return
        if note != BURIED:
            await self._burial.bury(ref, pickle.loads(note))
        await self._died(ref)

    async def _died(self, ref: WorkerRef) -> None:
        """Reported from now on, by the next controller too."""
        self._ray.note(str(ref), BURIED)
        self._dead.append(ref)
        if len(self._dead) > MAX_DEAD:
            self._ray.forget(str(self._dead.popleft()))
        await self._deaths.died(ref)

    def _spawn(self, order: StartWorker) -> tuple[Actor, WorkerConfig]:
        ref, config = order.ref, self._config
        resource = RESOURCES[config.roles[ref.worker_id]]  # of its place, whatever it serves as
        num_gpus = config.tensor_parallel_size if config.tensor_parallel_size > 1 else 0
        actor = self._ray.create(WorkerActor, str(ref), self._paths.worker, resource=resource, num_gpus=num_gpus)
        return actor, self._worker_config(ref, order.role)

    def _worker_config(self, ref: WorkerRef, role: Role) -> WorkerConfig:
        addresses = self._config.registry_addresses
        return worker_config(self._config, ref.worker_id, ref.incarnation, role, router_addresses=addresses)

    def _heard(self, event: Event) -> None:
        match event:
            case _ if self._stopping:
                return
            case WorkerStarted(ref):
                self._progress.say(f"{ref} is ready")
            case StartFailed(ref, reason):
                self._progress.say(f"{ref} did not start ({reason}), trying again")
            case WorkerDied(ref, reason):
                self._progress.say(f"{ref} is gone ({reason})")

    async def _answer_probes(self) -> web.AppRunner:
        """/livez: this process runs. /readyz: every wanted worker is READY. Raises: BadRequest: the port is taken."""
        host, port = self._config.controller_health_host, self._config.controller_health_port
        app = web.Application()
        app.router.add_get("/livez", self._livez)
        app.router.add_get("/readyz", self._readyz)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            await runner.cleanup()
            raise BadRequest("controller_health_port", f"{port} on {host} cannot be listened on: {error}") from error
        return runner

    async def _livez(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _readyz(self, _request: web.Request) -> web.Response:
        if self._controller.all_ready and not self._stopping:
            return web.json_response({"status": "ok"})
        return web.json_response({"status": "unavailable", "workers": self._controller.lives}, status=503)
