"""Ray, as Tandem uses it: places, watches and kills actor processes. The only module that knows Ray.

Life: 1. `start` sets the environment (before Ray is imported) and boots a loopback-only, token-guarded Ray in a thread
of its own; 2. `create` makes detached actors that Ray never restarts: our controller does, and sooner; 3. `stop` ends
it.

Why a thread: Ray ties its processes to the thread that starts them (PR_SET_PDEATHSIG), so that thread must live as long
as the cluster does, and meanwhile the event loop stays free for signals and progress.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import secrets
import sys
import threading
from pathlib import Path
from typing import Any, Final

from core.errors import TandemError

OBJECT_STORE_BYTES: Final = 80 << 20  # nothing of ours lies there; 75 MiB is Ray's minimum
ACTOR_CONCURRENCY: Final = 1000  # `watch` calls wait for as long as the actor lives

ENVIRONMENT: Final = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # odd name: on Linux it makes the address 127.0.0.1, every port loopback
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # else `uv run` packs the whole folder and starts actors through uv
    "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",  # no C++ stack dump on SIGTERM
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # prints no essay when a worker dies: our controller says it in a line
    "RAY_worker_niceness": "0",  # Ray's default of 15 would let any other process starve the engine
    "RAY_memory_monitor_refresh_ms": "0",  # our pools are bounded; Ray must not kill a worker because others use memory
}


class RayFailed(TandemError):
    """Ray did not start, or not in time."""


class ActorLost(TandemError):
    """The actor's process is gone, or cannot be started."""


class ActorError(TandemError):
    """A method of the actor raised; the actor itself lives, its log has the traceback."""


class Actor:
    """Handle of one actor process. Every call may raise ActorLost, ActorError or TimeoutError."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def call(self, method: str, *arguments: object, timeout_s: float | None) -> Any:
        """Result of an actor method; None waits for as long as the actor lives."""
        from ray.exceptions import RayActorError, RayError, RayTaskError

        try:
            future = getattr(self._handle, method).remote(*arguments).future()
            async with asyncio.timeout(timeout_s):
                return await asyncio.wrap_future(future)
        except RayActorError as error:
            raise ActorLost(str(error).partition("\n")[0]) from None
        except RayTaskError as error:
            raise ActorError(str(error.cause)) from None
        except RayError as error:
            raise ActorLost(f"{type(error).__name__}: {error}") from None

    def kill(self) -> None:
        """End the process at once; harmless when it has ended."""
        import ray

        if ray.is_initialized():
            ray.kill(self._handle, no_restart=True)


class RayRuntime:
    """A private Ray on this machine."""

    def __init__(self, num_actors: int, folder: Path) -> None:
        """`folder` is for Ray's sockets and logs; its path must be short (cluster.folders.ray_folder)."""
        self._num_actors = num_actors
        self._folder = folder
        self._token = secrets.token_hex(32)  # in the environment of our processes only, never in a file
        self._stop = threading.Event()
        self._started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._stopped: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._own, name="ray-owner", daemon=True)

    async def start(self, timeout_s: float) -> None:
        """Boot Ray. Raises: RayFailed."""
        self._thread.start()
        try:
            # Shielded: who gives up waiting must not make the future look cancelled to the thread.
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(asyncio.wrap_future(self._started))
        except TimeoutError:
            raise RayFailed(f"Ray did not start within {timeout_s:.0f} s") from None

    def create(self, actor_class: type, name: str, *arguments: object) -> Actor:
        """A new actor process; its constructor's failure shows in the first call."""
        import ray

        options: dict[str, Any] = {"name": name, "lifetime": "detached", "max_concurrency": ACTOR_CONCURRENCY}
        remote_class: Any = ray.remote(actor_class)
        actor = remote_class.options(num_cpus=0, max_restarts=0, max_task_retries=0, **options)
        return Actor(actor.remote(*arguments))

    async def stop(self, timeout_s: float) -> bool:
        """End Ray and all actors; False when it has not ended in time. Harmless before `start` and after `stop`."""
        self._stop.set()
        if not self._thread.ident:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(asyncio.wrap_future(self._stopped))
        except TimeoutError:
            return False
        return True

    def _own(self) -> None:
        """The owner thread: boots, waits, shuts down."""
        try:
            self._boot()
            self._started.set_result(None)
        except Exception as error:
            self._started.set_exception(RayFailed(f"Ray did not start: {error}"))
        else:
            self._stop.wait()
        finally:
            self._shut_down()
            self._stopped.set_result(None)

    def _boot(self) -> None:
        os.environ.update(ENVIRONMENT, RAY_AUTH_TOKEN=self._token)
        import ray
        from ray.job_config import JobConfig

        # address="local": else Ray joins whatever cluster RAY_ADDRESS or a left-over address file names.
        ray.init(
            address="local",
            num_cpus=self._num_actors,  # so many processes are started ahead; actors themselves ask for none
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.CRITICAL,
            namespace="tandem",
            # Actors import what we import, in our order; Ray puts each entry before the ones it has.
            job_config=JobConfig(_py_driver_sys_path=[os.path.abspath(entry) for entry in reversed(sys.path)]),
            _temp_dir=str(self._folder),
        )

    def _shut_down(self) -> None:
        import ray

        ray.shutdown()
