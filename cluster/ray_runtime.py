"""Ray, as Tandem uses it: places, watches and kills actor processes. The only module that knows Ray.

Life: 1. `start` sets the environment (before Ray is imported) and, in a thread of its own, boots a loopback-only,
token-guarded Ray or joins one that runs on several hosts; 2. `create` makes detached actors that Ray never restarts:
our controller does, and sooner; 3. `stop` ends the Ray that was booted, or leaves the one that was joined.

Why a thread: Ray ties its processes to the thread that starts them (PR_SET_PDEATHSIG), so that thread must live as long
as the cluster does, and meanwhile the event loop stays free for signals and progress.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import secrets
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from core.errors import CommandFailed, TandemError

OBJECT_STORE_BYTES: Final = 80 << 20  # nothing of ours lies there; 75 MiB is Ray's minimum
ACTOR_CONCURRENCY: Final = 1000  # `watch` calls wait for as long as the actor lives

NAMESPACE: Final = "tandem"
NOTES: Final = b"tandem-actors"  # of Ray's key-value store, which lives as long as its other tables
RETRY_S: Final = 1.0
STOP_TIMEOUT_S: Final = 15.0

ENVIRONMENT: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # else `uv run` packs the whole folder and starts actors through uv
    "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",  # no C++ stack dump on SIGTERM
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # prints no essay when a worker dies: our controller says it in a line
}
PRIVATE_ENVIRONMENT: Final = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # odd name: on Linux it makes the address 127.0.0.1, every port loopback
    "RAY_AUTH_MODE": "token",
    "RAY_worker_niceness": "0",  # Ray's default of 15 would let any other process starve the engine
    "RAY_memory_monitor_refresh_ms": "0",  # our pools are bounded; Ray must not kill a worker because others use memory
    "RAY_process_group_cleanup_enabled": "true",  # what a dead worker had started is killed, frozen or not: its ranks
}


class ActorFailed(TandemError):
    """The actor's process is gone or cannot be started, or a method of it raised: its log has the traceback."""


class ActorHung(ActorFailed):
    """It did not answer in time."""


def this_host() -> str:
    """Ray's id of the host that this actor runs on. A host that comes back has another one."""
    import ray

    return str(ray.get_runtime_context().get_node_id())


def this_hosts_labels() -> dict[str, str]:
    """What `ray start --labels` said of the host that this actor runs on, and Ray's own labels."""
    import ray

    labels: dict[str, Any] = ray.get_runtime_context().get_node_labels()  # Ray's hint says lists
    return labels


def note_this_actor(note: bytes) -> None:
    """Keep a note on this actor, by its name, for longer than it lives."""
    import ray

    _note(str(ray.get_runtime_context().get_actor_name()), note)


def _note(name: str, note: bytes) -> None:
    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(name.encode(), note, namespace=NOTES)


class Actor:
    """Handle of one actor process. Every call may raise ActorFailed."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def call(self, method: str, *arguments: object, timeout_s: float | None) -> Any:
        """Result of an actor method; None waits for as long as the actor lives."""
        return await _result(lambda: getattr(self._handle, method).remote(*arguments), timeout_s)

    def kill(self) -> None:
        """End the process at once; harmless when it has ended."""
        import ray

        if ray.is_initialized():
            ray.kill(self._handle, no_restart=True)


class RayRuntime:
    """A Ray to run actors on: `RayRuntime.private` or `RayRuntime.joined`."""

    def __init__(self, environment: dict[str, str], *, patient: bool, **arguments: Any) -> None:
        """`arguments` of ray.init. patient: try again while Ray is not there yet."""
        self._environment = environment
        self._patient = patient
        self._arguments = arguments
        self._lack = ""  # why the last try failed
        self._stop = threading.Event()
        self._started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._stopped: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._own, name="ray-owner", daemon=True)

    @classmethod
    def private(cls, num_actors: int, folder: Path) -> RayRuntime:
        """A Ray of our own on this machine. `folder` is for its sockets and logs; its path must be short
        (cluster.folders.ray_folder)."""
        token = secrets.token_hex(32)  # in the environment of our processes only, never in a file
        return cls(
            PRIVATE_ENVIRONMENT | {"RAY_AUTH_TOKEN": token},
            patient=False,
            # "local": else Ray joins whatever cluster RAY_ADDRESS or a left-over address file names.
            address="local",
            num_cpus=num_actors,  # so many processes are started ahead; actors themselves ask for none
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            _temp_dir=str(folder),
        )

    @classmethod
    def joined(cls, address: str) -> RayRuntime:
        """The Ray at host:port, which has a node on this host too. Its token comes from the environment."""
        # Its actors have no log files of ours: what they write comes out here, line by line.
        mode = os.environ.get("RAY_AUTH_MODE", "token")
        environment = {"RAY_AUTH_MODE": mode, "RAY_DEDUP_LOGS": "0", "RAY_COLOR_PREFIX": "0"}
        return cls(environment, patient=True, address=address, log_to_driver=True)

    async def start(self, timeout_s: float) -> None:
        """Boot or join. Raises: CommandFailed."""
        self._thread.start()
        try:
            # Shielded: who gives up waiting must not make the future look cancelled to the thread.
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(asyncio.wrap_future(self._started))
        except TimeoutError:
            raise CommandFailed(f"Ray did not start within {timeout_s:.0f} s" + self._lack) from None

    def create(
        self, actor_class: type, name: str, *arguments: object, resource: str | None = None, num_gpus: int = 0
    ) -> Actor:
        """A new actor process, on a host that has one `resource` and so many GPUs free, which then are those that it
        sees; 0: all are. Its constructor's failure shows in the first call."""
        import ray

        options: dict[str, Any] = {"name": name, "lifetime": "detached", "max_concurrency": ACTOR_CONCURRENCY}
        if resource is not None:
            options["resources"] = {resource: 1}
        if num_gpus:
            options["num_gpus"] = num_gpus
        remote_class: Any = ray.remote(actor_class)
        actor = remote_class.options(num_cpus=0, max_restarts=0, max_task_retries=0, **options)
        return Actor(actor.remote(*arguments))

    async def run_on(self, host: str, function: Callable[..., Any], *arguments: object, timeout_s: float) -> Any:
        """Result of a function that runs in a process on that very host. Raises: as a call of an actor."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        remote_function: Any = ray.remote(function)
        there = NodeAffinitySchedulingStrategy(host, soft=False)
        task = remote_function.options(num_cpus=0, max_retries=0, scheduling_strategy=there)
        return await _result(lambda: task.remote(*arguments), timeout_s)

    async def is_alive(self, host: str) -> bool:
        """Whether Ray still hears of that host."""
        import ray

        nodes = await asyncio.to_thread(ray.nodes)
        return any(node["NodeID"] == host and node["Alive"] for node in nodes)

    def actors(self) -> dict[str, Actor]:
        """All actors that there are, by name: those of an earlier driver too."""
        import ray

        found: dict[str, Actor] = {}
        for name in ray.util.list_named_actors():
            with contextlib.suppress(ValueError):  # it has just ended
                found[name] = Actor(ray.get_actor(name))
        return found

    def notes(self) -> dict[str, bytes]:
        """On each actor that made one and was not forgotten, by name."""
        from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_list

        found = {key: _internal_kv_get(key, namespace=NOTES) for key in _internal_kv_list(b"", namespace=NOTES)}
        return {key.decode(): note for key, note in found.items() if note is not None}

    def note(self, name: str, note: bytes) -> None:
        """Change the note on an actor."""
        _note(name, note)

    def forget(self, name: str) -> None:
        """The note on an actor is not needed any more."""
        from ray.experimental.internal_kv import _internal_kv_del

        _internal_kv_del(name.encode(), namespace=NOTES)

    async def stop(self, timeout_s: float) -> None:
        """End Ray and all actors, or leave a Ray that was joined: for so long. Harmless before `start` and after
        `stop`."""
        self._stop.set()
        if self._thread.ident:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await asyncio.shield(asyncio.wrap_future(self._stopped))

    def _own(self) -> None:
        """The owner thread: boots, waits, shuts down."""
        try:
            self._initialize()
            self._started.set_result(None)
        except Exception as error:
            self._started.set_exception(CommandFailed(f"Ray did not start: {error}"))
        else:
            self._stop.wait()
        finally:
            self._shut_down()
            self._stopped.set_result(None)

    def _initialize(self) -> None:
        os.environ.update(ENVIRONMENT, **self._environment)
        import ray
        from ray.job_config import JobConfig

        # Actors import what we import, in our order; Ray puts each entry before the ones it has.
        job = JobConfig(_py_driver_sys_path=[os.path.abspath(entry) for entry in reversed(sys.path)])
        while True:
            try:
                ray.init(logging_level=logging.CRITICAL, namespace=NAMESPACE, job_config=job, **self._arguments)
                return
            except (ConnectionError, RuntimeError) as error:
                self._lack = f": {error}"
                if not self._patient or self._stop.wait(RETRY_S):
                    raise

    def _shut_down(self) -> None:
        import ray

        ray.shutdown()


async def _result(call: Callable[[], Any], timeout_s: float | None) -> Any:
    """What a remote call returns, or its failure as one of ours."""
    from ray.exceptions import RayActorError, RayError, RayTaskError

    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.wrap_future(call().future())
    except RayActorError as error:
        raise ActorFailed(_end_of(error)) from None
    except RayTaskError as error:
        raise ActorFailed(str(error.cause) or type(error.cause).__name__) from None
    except RayError as error:
        raise ActorFailed(f"{type(error).__name__}: {error}") from None
    except TimeoutError:
        raise ActorHung(f"no answer for {timeout_s:g} s") from None


def _end_of(error: Any) -> str:
    """What became of an actor, in a line: Ray says it in a paragraph, and whatever it was, that it may have been this
    or that. error: a RayActorError."""
    from ray.exceptions import ActorDiedError

    lines = str(error).strip().splitlines()
    if error.actor_init_failed:
        return lines[-1]  # of a traceback
    if any("its node has died" in line for line in lines):
        return "its host was lost"
    return "its process ended" if isinstance(error, ActorDiedError) else lines[0]
