"""What runs inside a Ray actor's process: a worker or a router, its log file, its thread settings. Does not load torch.

What it is (cluster.worker.process.WorkerProcess, router.main.RouterProcess) is named by an import path and imported
only here, in the actor's process: so the launcher never loads torch, and thread settings stand in the environment
before torch reads them.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import importlib
import os
import pickle
import signal
import socket
import sys
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from cluster import processes
from cluster.burial import Location
from cluster.ray_runtime import STOP_TIMEOUT_S, note_this_actor, this_host, this_hosts_labels
from cluster.worker.config import WorkerConfig
from core.identity import SCHEMA_REVISION
from core.membership import Role, WorkerInfo
from telemetry.logs import setup_logs

# One engine step is small: more threads than one would only wait for each other, and two workers would share them.
WORKER_ENVIRONMENT: Final = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
NVLINK_LABEL: Final = "ray.io/gpu-domain"  # of a Ray host: KubeRay's name for a domain of GPUs joined by NVLink


@dataclass(frozen=True, slots=True)
class ProcessPaths:
    """Import paths of what runs inside the actor processes."""

    worker: str = "cluster.worker.process:WorkerProcess"
    router: str = "router.main:RouterProcess"


@dataclass(frozen=True, slots=True)
class ServingWorker:
    """config: what it was started with. info: its role there is what it serves as now. revision: of its messages.
    stands_in: that role is not its place's, it is to go back."""

    config: WorkerConfig
    info: WorkerInfo
    revision: int = SCHEMA_REVISION
    stands_in: bool = False


class _ProcessActor:
    """Start, ping, watch and stop one such object. A failure reaches the caller as plain text: exceptions of
    libraries do not always survive the way between processes."""

    def __init__(self, path: str, environment: dict[str, str]) -> None:
        os.environ.update(environment)
        self._path = path
        self._process: Any = None

    async def prepare(self) -> None:
        """Import it ahead of `start`."""
        self._process = self._process or _import_process(self._path)

    async def start(self, config: Any) -> Any:
        """Import it, start it; returns what it says of itself."""
        try:
            await self.prepare()
            return await self._process.start(config)
        except Exception as error:
            traceback.print_exc()
            raise RuntimeError(f"{type(error).__name__}: {error}") from None

    async def stop(self) -> None:
        """Close servers and connections."""
        if self._process is not None:
            await self._process.stop()

    async def watch(self) -> None:
        """Never returns: the call breaks when this process dies, which is how the controller learns of it."""
        await asyncio.Event().wait()

    async def ping(self) -> int:
        """This process's pid; answers as long as the event loop turns."""
        return os.getpid()

    async def locate(self) -> Location:
        """Where to find this process when it does not answer any more. Kept in Ray's own tables too, for a controller
        that comes after it has ended."""
        process = processes.find(os.getpid())
        assert process is not None
        location = Location(this_host(), process)
        note_this_actor(pickle.dumps(location))
        return location


class WorkerActor(_ProcessActor):
    """The process of one prefill or decode worker. Which one, `start` says."""

    def __init__(self, path: str) -> None:
        super().__init__(path, WORKER_ENVIRONMENT)
        self._started: ServingWorker | None = None
        self._serves = self._drained = False
        self._sigterm = _wakeup_on_sigterm()

    async def prepare(self) -> None:
        """As above. From now on SIGTERM is a notice that the host goes away."""
        asyncio.get_running_loop().add_reader(self._sigterm, self._noticed)
        await super().prepare()

    async def start(self, config: WorkerConfig) -> WorkerInfo:
        """Load weights, listen, announce."""
        if config.log_file is not None:
            _redirect_output(config.log_file)
        setup_logs(config.worker_id)
        domain = this_hosts_labels().get(NVLINK_LABEL, "")
        info: WorkerInfo = await super().start(replace(config, nvlink_domain=domain))
        self._started, self._serves = ServingWorker(config, info), True
        return info

    async def describe(self) -> ServingWorker | None:
        """For a controller that did not start it. None: it has not started, drains, or changes its role."""
        return self._started if self._serves else None

    def _noticed(self) -> None:
        if signal.SIGTERM not in self._sigterm.recv(64):
            return
        if self._started is None:
            os._exit(0)
        asyncio.get_running_loop().remove_reader(self._sigterm)
        config = self._started.config
        self._leaving = asyncio.create_task(self._leave(config.drain_timeout_s, config.drain_finish_s))

    async def _leave(self, timeout_s: float, finish_s: float) -> None:
        """Drain, close, end: the keeper sees the process gone and starts another."""
        try:
            await self.drain(timeout_s, finish_s)
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self.stop()
        finally:
            os._exit(0)

    async def drain(self, timeout_s: float, finish_s: float) -> str:
        """As cluster.worker.process.WorkerProcess.drain."""
        self._serves, self._drained = False, True
        return str(await self._process.drain(timeout_s, finish_s))

    async def switch_role(self, role: Role, stands_in: bool, timeout_s: float, finish_s: float) -> str:
        """As cluster.worker.process.WorkerProcess.switch_role; one that serves so already need not drain for it."""
        started, left = self._started, ""
        if not (self._serves and started is not None and started.info.role is role):
            self._serves = False
            left = str(await self._process.switch_role(role, timeout_s, finish_s))
        if not left and started is not None:
            self._started = replace(started, info=replace(started.info, role=role), stands_in=stands_in)
            self._drained = False
        self._serves = not self._drained
        return left


class RouterActor(_ProcessActor):
    """The process of the router."""

    def __init__(self, path: str, log_file: Path) -> None:
        _redirect_output(log_file)
        super().__init__(path, {})
        setup_logs("router")


def _wakeup_on_sigterm() -> socket.socket:
    """Readable once SIGTERM has come. Call it in an actor's constructor: Ray runs that beside the main thread, which
    alone may set a handler, does so when it takes over the new actor, and never runs Python again. So what comes of it
    is the byte that CPython's own C handler writes; Ray's handler would leave a process that hangs."""
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)

    def install(_argument: object) -> int:
        signal.signal(signal.SIGTERM, lambda _number, _frame: None)
        signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
        return 0

    _pending.append(_PendingCall(install))
    ctypes.pythonapi.Py_AddPendingCall(_pending[-1], None)
    return reader


_PendingCall: Final = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_pending: Final[list[Any]] = []  # ctypes' callbacks live as long as they are referred to


def _import_process(path: str) -> Any:
    """An instance of the class that "package.module:Class" names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)()


def _redirect_output(log_file: Path) -> None:
    """Send this process's stdout and stderr, of C libraries too, to `log_file`, and crashes' stacks with them."""
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    # New objects: Ray's own ones write to Ray's log files.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable()
