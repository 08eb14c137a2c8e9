"""Keeps the workers of a cluster on several hosts: the controller of cluster/controller.py over a Ray that it joins.

1. Answer probes; join Ray; end what an earlier controller left, since nobody watches it.
2. Start each wanted worker on a host that has its role's custom resource free, and replace what dies. A host that is
   not there yet, or not any more, shows as a worker that does not start: it is tried again.
3. Tell every router who died; a router that starts anew hears of the old deaths too.
4. Stop: drain the workers, end them, leave Ray.
"""

from __future__ import annotations

import asyncio
from random import SystemRandom
from typing import Final

from aiohttp import web

from cluster.actors import HostPaths, WorkerActor
from cluster.burial import HostBurial
from cluster.config import ClusterConfig, WorkerConfig, worker_config
from cluster.controller import ActorFailures, Controller
from cluster.controller_service import serve_controller
from cluster.death_notices import DeathNotices
from cluster.fleet import Event, Fleet, StartFailed, StartWorker, WorkerDied, WorkerStarted
from cluster.progress import Progress
from cluster.ray_runtime import STOP_TIMEOUT_S, Actor, RayRuntime
from core.errors import BadRequest
from core.membership import Role, WorkerInfo, WorkerRef

RESOURCES: Final = {Role.PREFILL: "tandem_prefill", Role.DECODE: "tandem_decode"}
LOCATE_TIMEOUT_S: Final = 10.0


class HostController:
    """Make one per run."""

    def __init__(self, config: ClusterConfig, progress: Progress, hosts: HostPaths | None = None) -> None:
        self._config = config
        self._progress = progress
        self._hosts = hosts or HostPaths()
        self._ray = RayRuntime.joined(config.ray_address)
        self._burial = HostBurial(self._ray, config.registry_addresses)
        self._deaths = DeathNotices(config.registry_addresses)
        fleet = Fleet(config.roles, SystemRandom())
        self._controller = Controller(fleet, self._spawn, config, self._heard, self._burial.bury, self._deaths.died)
        self._keeping = False
        self._stopping = False

    @property
    def workers(self) -> dict[str, WorkerInfo]:
        """READY ones, by worker id."""
        return self._controller.workers

    async def run(self, stop: asyncio.Event) -> None:
        """Everything, until `stop` is set. Raises: BadRequest, RayFailed, or the error that ended the controller."""
        probes = await self._answer_probes()
        service = await serve_controller(self._controller, self._config)
        working, stopping = asyncio.create_task(self._work()), asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
            self._stopping = True
            if self._keeping:
                async with self._progress.step("draining the workers"):
                    await self._controller.stop()
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
        leftovers = self._ray.actors()
        async with asyncio.TaskGroup() as works:
            for work in (self._controller.run(), self._deaths.run()):
                works.create_task(work)
            for name, actor in leftovers.items():
                works.create_task(self._end_leftover(WorkerRef.parse(name), actor))
            self._keeping = True

    async def _end_leftover(self, ref: WorkerRef, actor: Actor) -> None:
        self._progress.say(f"{ref.worker_id} is of an earlier controller: ending it")
        try:
            location = await actor.call("locate", timeout_s=LOCATE_TIMEOUT_S)
        except ActorFailures:
            actor.kill()
            return
        actor.kill()
        await self._burial.bury(ref, location)
        await self._deaths.died(ref)

    def _spawn(self, order: StartWorker) -> tuple[Actor, WorkerConfig]:
        ref, config = order.ref, self._config
        resource = RESOURCES[dict(config.roles)[ref.worker_id]]  # of its place, whatever it serves as
        actor = self._ray.create(WorkerActor, str(ref), self._hosts.worker, resource=resource)
        return actor, worker_config(
            config, ref.worker_id, ref.incarnation, order.role, router_addresses=config.registry_addresses
        )

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
