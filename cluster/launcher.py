"""One cluster on this machine, from nothing to nothing.

1. Valkey (unless a Redis is given) and Ray start side by side.
2. The routers and all workers start side by side, each in a process of its own; the workers announce themselves.
3. Each router sees every worker, and every prefill worker is connected to every decode worker.
4. `after_start` (the self check) runs; then we serve, and replace what dies, until a stop is asked for.
5. Drain, end routers, workers, Ray, Valkey; no process below us is left.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import SystemRandom
from typing import Any, Final

import grpc

from cluster import processes
from cluster.actors import ProcessPaths, RouterActor, WorkerActor
from cluster.burial import bury_here
from cluster.config import ClusterConfig, router_config, worker_config
from cluster.controller import Controller
from cluster.controller_service import listen_controller
from cluster.cores import apart
from cluster.death_notices import DeathNotices
from cluster.fleet import Fleet
from cluster.fleet_events import Event, StartFailed, StartWorker, WorkerDied, WorkerStarted
from cluster.folders import RunFolders
from cluster.last_drain import drain_all, tell_open_requests
from cluster.progress import Progress
from cluster.ray_runtime import STOP_TIMEOUT_S, Actor, RayRuntime
from cluster.router_keeper import RouterKeeper
from cluster.spare import SpareWorker
from cluster.status_client import fetch_status, missing
from cluster.valkey import EmbeddedValkey
from cluster.worker.config import WorkerConfig
from core.errors import CommandFailed, Unreachable
from router.config import RouterConfig

RAY_START_TIMEOUT_S: Final = 60.0
REDIS_TIMEOUT_S: Final = 2.0
CONNECT_TIMEOUT_S: Final = 30.0
EXIT_TIMEOUT_S: Final = 5.0
POLL_S: Final = 0.05


class Launcher:
    """Make one per run, in the event loop of the main thread; ports must be resolved (cluster.preflight)."""

    def __init__(
        self, config: ClusterConfig, folders: RunFolders, progress: Progress, paths: ProcessPaths | None = None
    ) -> None:
        self._config = config
        self._logs = folders.logs
        self._progress = progress
        self._paths = paths or ProcessPaths()
        self._ray = RayRuntime.private(len(config.roles) + config.num_routers, folders.ray)
        self._valkey: EmbeddedValkey | None = None
        fleet = Fleet(config.roles, SystemRandom(), stand_in=config.stand_in)
        self._deaths = DeathNotices(config.registry_addresses)
        self._controller = Controller(fleet, self._spawn_worker, config, self._heard, bury_here, self._deaths.died)
        self._service: grpc.aio.Server | None = None
        self._routers = [
            RouterKeeper(name, partial(self._spawn_router, index, name), config, progress.say)
            for index, name in enumerate(_router_names(config.num_routers))
        ]
        self._started = asyncio.Event()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._background: list[asyncio.Task[None]] = []
        self._keeping_routers: list[asyncio.Task[None]] = []
        self._controlling: asyncio.Task[None] | None = None
        self._spare = SpareWorker(self._create_worker, config.start_timeout_s, config.heartbeat_timeout_s)
        self._cores = apart(os.sched_getaffinity(0))
        self._serving = False
        self._stopping = False

    async def run(self, stop: asyncio.Event, after_start: Callable[[], Awaitable[None]]) -> None:
        """Everything, until `stop` is set. Raises: TandemError, once all is down again."""
        processes.adopt_orphans()
        try:
            if await self._unless_stopped(stop, self._bring_up()):
                await self._unless_stopped(stop, self._serve(after_start))
        finally:
            await self._shut_down()

    async def _unless_stopped(self, stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
        """True when `work` is done; False when a stop came first. A failed worker or router ends it by its error."""
        working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
        try:
            waited: set[asyncio.Future[Any]] = {working, stopping, self._failed}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
            if not working.done():
                return False
            working.result()
            return True
        finally:
            working.cancel()
            stopping.cancel()
            await asyncio.gather(working, stopping, return_exceptions=True)

    async def _bring_up(self) -> None:
        async with self._progress.step("starting Ray" + ("" if self._config.redis_url else " and Valkey")):
            await asyncio.gather(self._ray.start(RAY_START_TIMEOUT_S), self._start_valkey())
        names = ", ".join(self._config.roles)
        routers = "the router" if len(self._routers) == 1 else f"{len(self._routers)} routers"
        async with self._progress.step(f"starting {routers}, loading weights into {names}"):
            self._keeping_routers = [self._keep(router.run()) for router in self._routers]
            self._controlling = self._keep(self._controller.run())
            self._keep(self._deaths.run())
            self._service = await listen_controller(self._controller, self._config)
            await asyncio.gather(self._started.wait(), *(router.started.wait() for router in self._routers))
        async with self._progress.step("connecting workers"):
            await asyncio.gather(*map(self._connected, self._config.registry_addresses))

    async def _serve(self, after_start: Callable[[], Awaitable[None]]) -> None:
        await after_start()
        self._serving = True
        self._spare.refill()
        await asyncio.Event().wait()

    async def _start_valkey(self) -> None:
        if self._config.redis_url is None:
            self._valkey = await EmbeddedValkey.start(self._logs / "valkey.log")
            self._config = replace(self._config, redis_url=self._valkey.url)
            return
        # Imported here: slow (redis), and needed for a Redis that was given alone.
        from kv_transfer.bounded_redis import redis_lack

        if lack := await redis_lack(self._config.redis_url, REDIS_TIMEOUT_S):
            alone = "until it does, prefixes are not shared, and each router holds limits alone"
            self._progress.say(f"redis_url: no Redis answers ({lack}): {alone}")

    async def _connected(self, router: str) -> None:
        """Wait until a router sees every worker and every pair."""
        lack = "the router does not answer"
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                while lack:
                    try:
                        lack = missing(await fetch_status(router), self._config)
                    except Unreachable as error:
                        lack = str(error)
                    await asyncio.sleep(POLL_S if lack else 0.0)
        except TimeoutError:
            raise CommandFailed(f"after {CONNECT_TIMEOUT_S:.0f} s: {lack}; logs are in {self._logs}") from None

    def _keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` for as long as the cluster runs; its end is ours."""
        task = asyncio.create_task(work)
        self._background.append(task)
        task.add_done_callback(self._background_ended)
        return task

    def _background_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)

    def _heard(self, event: Event) -> None:
        """Tell the user; a worker that cannot start is an end only while the cluster comes up."""
        match event:
            case _ if self._stopping:
                return
            case WorkerStarted(ref):
                core = self._config.core_of(ref.worker_id, self._cores)
                self._progress.say(f"{ref.worker_id} is ready{'' if core is None else f', on core {core}'}")
                if self._serving:
                    self._spare.refill()
            case StartFailed(ref, reason) if not self._started.is_set():
                self._fail(
                    CommandFailed(f"{ref.worker_id} did not start: {reason}; its log is {self._log(ref.worker_id)}")
                )
            case StartFailed(ref, reason):
                self._progress.say(f"{ref.worker_id} did not start ({reason}), trying again")
            case WorkerDied(ref, reason):
                self._progress.say(f"{ref.worker_id} is gone ({reason}); its log is {self._log(ref.worker_id)}")
        if self._controller.all_ready:
            self._started.set()

    def _spawn_worker(self, order: StartWorker) -> tuple[Actor, WorkerConfig]:
        ref = order.ref
        return self._spare.take(), worker_config(
            self._config,
            ref.worker_id,
            ref.incarnation,
            order.role,
            router_addresses=self._config.registry_addresses,
            cpu_core=self._config.core_of(ref.worker_id, self._cores),
            gpu_index=self._config.ordinal(ref.worker_id) * self._config.tensor_parallel_size,
            log_file=self._log(ref.worker_id),
        )

    def _create_worker(self) -> Actor:
        return self._ray.create(WorkerActor, f"worker-{os.urandom(4).hex()}", self._paths.worker)

    def _spawn_router(self, index: int, name: str) -> tuple[Actor, RouterConfig]:
        actor = self._ray.create(RouterActor, f"{name}-{os.urandom(4).hex()}", self._paths.router, self._log(name))
        return actor, router_config(self._config.of_router(index))

    def _log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    async def _shut_down(self) -> None:
        self._stopping = True
        self._spare.let_go()
        below = processes.descendants(os.getpid())
        async with self._progress.step("stopping"):
            if self._service is not None:
                await self._service.stop(grace=None)
            await self._drain()
            await _cancel(self._background)
            await self._ray.stop(STOP_TIMEOUT_S)
            if self._valkey is not None:
                self._valkey.stop()
            await self._leave_nothing(below)

    async def _drain(self) -> None:
        await _cancel(self._keeping_routers)
        timeout_s = self._config.drain_timeout_s
        telling = tell_open_requests(self._progress, self._config.registry_addresses, timeout_s)
        await drain_all([router.stop() for router in self._routers], self._stop_workers, telling, timeout_s)

    async def _stop_workers(self, drain_s: float) -> None:
        if self._controlling is not None and not self._controlling.done():
            await self._controller.stop(drain_s)

    async def _leave_nothing(self, below: set[processes.Process]) -> None:
        """What outlives its orderly end is killed, and named."""
        left = await processes.wait_gone(below | processes.descendants(os.getpid()), EXIT_TIMEOUT_S)
        for process in left:
            self._progress.say(f"killing {process.pid}, which did not end: {processes.command_of(process)[:100]}")
            processes.kill(process)
        still = await processes.wait_gone(left, EXIT_TIMEOUT_S)
        self._progress.say(f"stopped, {len(still) or 'no'} process left")


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=EXIT_TIMEOUT_S)


def _router_names(count: int) -> list[str]:
    """Of processes and log files."""
    return ["router"] if count == 1 else [f"router-{index}" for index in range(count)]
