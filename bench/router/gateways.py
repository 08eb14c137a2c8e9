"""The routers that bench/router/streams.py drives: processes on a core of their own, stub workers behind each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.processes import cpu_s, process_tree
from bench.servers import STOP_LIMIT_S
from cluster.free_ports import free_ports

ROUTER_CORE: Final = 0  # the workers and this process have the others
MAX_CONTEXT_TOKENS: Final = 1 << 17
MODEL_NAME: Final = "stub"
ROUTER_ENVIRONMENT: Final = {
    "TANDEM_NUM_BLOCKS": str(MAX_CONTEXT_TOKENS // 16),  # of a worker; nothing longer is let in
}


@dataclass(frozen=True)
class Gateway:
    """A started router. grpc_address: where its own gRPC API is, if it has one."""

    name: str
    pid: int
    url: str
    model: str
    grpc_address: str | None = None

    def cpu_s(self) -> float:
        """What it and all below it have computed so far."""
        return sum(cpu_s(Path(f"/proc/{pid}")) for pid in process_tree(self.pid))


@contextmanager
def floor() -> Iterator[Gateway]:
    """No router at all: an HTTP server that answers each prompt at once; what is left is the client's and HTTP's."""
    (port,) = free_ports(1)
    with _process([sys.executable, "-m", "bench.router.floor_server", str(port)], ROUTER_CORE) as pid:
        yield Gateway("floor: aiohttp alone", pid, f"http://127.0.0.1:{port}", MODEL_NAME)


@contextmanager
def tandem(
    folder: Path,
    token_ids: list[int],
    num_workers: int,
    settings: Mapping[str, str] | None = None,
    step_s: float = 0.0,
) -> Iterator[Gateway]:
    """settings: of the router, in its environment. step_s: of the workers, as bench/router/stub_worker.py."""
    http, grpc, registry = free_ports(3)
    command = [sys.executable, "-m", "cluster.main", "router", "--model", str(folder), "--model-name", MODEL_NAME]
    command += ["--http-port", str(http), "--grpc-port", str(grpc), "--registry-port", str(registry)]
    worker = [sys.executable, "-m", "bench.router.stub_worker", f"127.0.0.1:{registry}", str(step_s)]
    worker += map(str, token_ids)
    with ExitStack() as stack:
        pid = stack.enter_context(_process(command, ROUTER_CORE, settings))
        for _ in range(num_workers):
            stack.enter_context(_process(worker))
        yield Gateway("tandem", pid, f"http://127.0.0.1:{http}", MODEL_NAME, f"127.0.0.1:{grpc}")


@contextmanager
def smg(python: Path, folder: Path, token_ids: list[int], num_workers: int) -> Iterator[Gateway]:
    port, metrics_port, *ports = free_ports(2 + num_workers)
    command = [str(python), "-m", "smg.cli", "launch", "--host", "127.0.0.1", "--port", str(port), "--backend", "vllm"]
    command += ["--worker-urls", *(f"grpc://127.0.0.1:{item}" for item in ports), "--tokenizer-path", str(folder)]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port), "--log-level", "warn"]
    command += ["--worker-startup-check-interval", "1", "--shutdown-grace-period-secs", "1"]
    program = Path(__file__).with_name("smg_worker.py")
    with ExitStack() as stack:
        for item in ports:
            stack.enter_context(_process([str(python), str(program), str(item), str(folder), *map(str, token_ids)]))
        pid = stack.enter_context(_process(command, ROUTER_CORE))
        yield Gateway("smg", pid, f"http://127.0.0.1:{port}", MODEL_NAME)


@contextmanager
def long_context_folder(model: Path) -> Iterator[Path]:
    """The model's tokenizer under a configuration that takes prompts of 100,000 tokens. Its weights are empty."""
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as name:
        folder = Path(name)
        for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            (folder / file).write_bytes((model / file).read_bytes())
        config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": MAX_CONTEXT_TOKENS}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "model.safetensors").touch()
        yield folder


@contextmanager
def _process(command: list[str], core: int | None = None, settings: Mapping[str, str] | None = None) -> Iterator[int]:
    """Its pid. It has a process group of its own, of which nothing is left afterwards."""
    cores = {core} if core is not None else other_cores()
    pinned = ["taskset", "--cpu-list", ",".join(map(str, cores)), *command]
    environment = os.environ | ROUTER_ENVIRONMENT | dict(settings or {})
    log = Path(tempfile.mkdtemp(prefix="tandem-bench-")) / "log"
    with log.open("w") as out:
        process = subprocess.Popen(pinned, env=environment, stdout=out, stderr=out, process_group=0)
    try:
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def other_cores() -> set[int]:
    """Where the router is not; on a machine with one core it is everywhere."""
    return set(range(os.cpu_count() or 1)) - {ROUTER_CORE} or {ROUTER_CORE}
