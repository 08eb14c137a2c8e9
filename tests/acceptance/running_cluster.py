"""A whole cluster as a user starts it: `tandem up` in a process of its own, with Ray, Valkey, router and workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from tandem.v1 import worker_pb2, worker_pb2_grpc

from cluster import processes
from cluster.free_ports import free_ports
from engine.cache_folder import cache_folder
from engine.cpu.build import kernel_folder

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 40.0
POLICY = "policy.yaml"
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """Where it listens. `model` is the name to ask for; `policy` a file that it reads while it serves."""

    http: str
    grpc: str
    registry: str
    controller: str
    model: str
    folder: Path
    pid: int

    @property
    def policy(self) -> Path:
        return self.folder / POLICY

    def status(self) -> Any:
        """A tandem.v1.GetStatusResponse."""
        with grpc.insecure_channel(self.registry, options=(("grpc.enable_http_proxy", 0),)) as channel:
            return worker_pb2_grpc.RouterServiceStub(channel).GetStatus(worker_pb2.GetStatusRequest(), timeout=5)

    def workers(self) -> dict[str, Any]:
        """WorkerStatus by worker id."""
        return {item.worker.ref.worker_id: item for item in self.status().workers}

    def metrics(self) -> str:
        """The router's, as Prometheus reads them."""
        with urllib.request.urlopen(f"{self.http}/metrics", timeout=10) as response:
            return str(response.read().decode())

    def complete(
        self, prompt: Any, timeout_s: float = 300.0, headers: Mapping[str, str] | None = None, **fields: Any
    ) -> dict[str, Any]:
        """POST /v1/completions, greedy, with token ids."""
        body = {"model": self.model, "prompt": prompt, "temperature": 0, "return_token_ids": True, **fields}
        request = urllib.request.Request(
            f"{self.http}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", **(headers or {})},
        )
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return json.load(response)

    def worker_pid(self, worker_id: str) -> int:
        """The process of a worker: the one that listens at its address."""
        port = int(self.workers()[worker_id].worker.address.rpartition(":")[2])
        return pid_listening_on(port)

    def wait_idle(self, timeout_s: float = 30.0) -> None:
        """Until no worker holds a block and no request is open. Raises AssertionError with what is left."""

        def left() -> str:
            status = self.status()
            loads = {item.worker.ref.worker_id: item.load for item in status.workers}
            held = {
                name: (load.used_blocks, load.quarantined_blocks, load.running_requests, load.waiting_requests)
                for name, load in loads.items()
                if load.used_blocks or load.quarantined_blocks or load.running_requests or load.waiting_requests
            }
            return f"open={status.open_requests} held={held}" if status.open_requests or held else ""

        wait_until(lambda: not left(), timeout_s, left)


def wait_until(done: Callable[[], bool], timeout_s: float, describe: Callable[[], str] = lambda: "") -> None:
    """Poll a condition, bounded."""
    deadline_s = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() >= deadline_s:
            raise AssertionError(f"not within {timeout_s} s: {describe()}")
        time.sleep(0.05)


@contextmanager
def running_cluster(model: Path, cache: Path, *flags: str, **settings: Any) -> Iterator[RunningCluster]:
    """`tandem up` on free ports, up and connected; ended by Ctrl-C, and then nothing of it may be left."""
    http_port, grpc_port, registry_port, controller_port = free_ports(4)
    config = cache / "cluster.yaml"
    ports = {"http_port": http_port, "grpc_port": grpc_port, "registry_port": registry_port}
    (cache / POLICY).write_text("{}")
    values = {
        **ports, "controller_port": controller_port, "num_blocks": 512, "policy_file": str(cache / POLICY),
        "pin_workers": False,  # the clusters of two test processes would take the same cores
        **settings,
    }  # fmt: skip
    config.write_text(json.dumps(values))  # JSON is YAML
    for shared in (kernel_folder(), cache_folder() / "digests"):  # compiled and read once, not by every cluster
        shared.mkdir(parents=True, exist_ok=True)
        (cache / shared.name).symlink_to(shared)
    output = cache / "up.log"
    command = [sys.executable, "-m", "cluster.main", "up", "--model", str(model), "--config", str(config)]
    environment = {
        **os.environ,
        "TANDEM_CACHE": str(cache),
        "PYTHONPATH": f"{ROOT}:{ROOT / 'proto/python'}",
        "PYTHONUNBUFFERED": "1",
    }
    with output.open("wb") as log:
        process = subprocess.Popen(
            [*command, "--no-self-check", *flags], stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=cache
        )
    try:
        wait_until(
            lambda: b"serving; Ctrl-C stops" in output.read_bytes() or process.poll() is not None,
            START_TIMEOUT_S,
            lambda: explain(cache),
        )
        assert process.poll() is None, explain(cache)
        yield RunningCluster(
            f"http://127.0.0.1:{http_port}",
            f"127.0.0.1:{grpc_port}",
            f"127.0.0.1:{registry_port}",
            f"127.0.0.1:{controller_port}",
            model.name,
            cache,
            process.pid,
        )
    except BaseException:
        print(explain(cache))
        raise
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(f"did not stop within {STOP_TIMEOUT_S} s: {explain(cache)}") from None


def explain(cache: Path) -> str:
    """The tails of all logs of a run."""
    logs = [cache / "up.log", *sorted(cache.glob("run/*/logs/*.log"))]
    return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs if log.exists())


def pid_listening_on(port: int) -> int:
    """The process that has a listening socket on 127.0.0.1:port."""
    process = processes.listening_on(port)
    assert process is not None, f"nobody listens on {port}"
    return process.pid
