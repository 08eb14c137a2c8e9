"""One run of `tandem up`: the launcher, the self check and what the user is told."""

from __future__ import annotations

import asyncio
import json
import signal
from typing import Any, Final

from cluster.config import ClusterConfig
from cluster.folders import RunFolders
from cluster.launcher import Hosts, Launcher
from cluster.progress import Progress
from cluster.self_check import check_parity, check_request
from cluster.status_client import fetch_status

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PROMPT: Final = "The capital of France is"


def run_until_signal(
    config: ClusterConfig, folders: RunFolders, progress: Progress, self_check: bool, hosts: Hosts | None = None
) -> None:
    """`serve` until the first SIGINT, SIGTERM or SIGHUP; more of them change nothing. Raises: as `serve`."""
    try:
        asyncio.run(_until_signal(config, folders, progress, self_check, hosts))
    finally:
        # Everything is down: another Ctrl-C has nothing to break but the interpreter's own end.
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)


async def _until_signal(*details: Any) -> None:
    stop = asyncio.Event()
    for number in SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await serve(stop, *details)


async def serve(
    stop: asyncio.Event, config: ClusterConfig, folders: RunFolders, progress: Progress, self_check: bool,
    hosts: Hosts | None = None,
) -> None:  # fmt: skip
    """Serve until `stop` is set. Raises: TandemError: it did not come up, or the self check failed."""

    async def after_start() -> None:
        if self_check:
            await _check(config, progress)
        progress.plain(await _addresses(config))
        progress.say("serving; Ctrl-C stops")

    await Launcher(config, folders, progress, hosts).run(stop, after_start)


async def _check(config: ClusterConfig, progress: Progress) -> None:
    async with progress.step("asking for a first token"):
        await check_request(_http_url(config), config.served_model_name, max_tokens=1)
    progress.say("first token")
    if config.aggregated:
        await check_request(_http_url(config), config.served_model_name)
        progress.plain("parity: not applicable, aggregated: there is no prefill worker; a request works")
        return
    async with progress.step("checking: the same prompts, prefilled on a prefill worker and on the decode worker"):
        parity = await check_parity(_http_url(config), _grpc_address(config), config.served_model_name)
    progress.plain(parity.line)


async def _addresses(config: ClusterConfig) -> str:
    """How to call what is up."""
    body = json.dumps({"model": config.served_model_name, "prompt": PROMPT, "max_tokens": 16, "temperature": 0})
    message = json.dumps({"text": PROMPT, "stopping": {"max_tokens": 16}})
    status = await fetch_status(_grpc_address(config))
    metrics = [f"{item.worker.ref.worker_id} http://{item.worker.metrics_address}/metrics"
               for item in status.workers if item.worker.metrics_address]  # fmt: skip
    call = (
        "import grpc; from tandem.v1 import inference_pb2 as m, inference_pb2_grpc as s; "
        f"stub = s.InferenceServiceStub(grpc.insecure_channel('{_grpc_address(config)}')); "
        f"print(''.join(r.text for r in stub.Generate(m.GenerateRequest(text='{PROMPT}', "
        "stopping=m.Stopping(max_tokens=16)))))"
    )
    return "\n".join([
        "",
        f"  curl {_http_url(config)}/v1/completions -H 'Content-Type: application/json' -d '{body}'",
        "",
        f"  grpcurl -plaintext -d '{message}' {_grpc_address(config)} tandem.v1.InferenceService/Generate",
        f'  python -c "{call}"',
        "",
        f"  metrics: router {_http_url(config)}/metrics",
        *(f"           {line}" for line in sorted(metrics)),
        "  tandem chat, tandem status: from another terminal",
        "",
    ])  # fmt: skip


def _http_url(config: ClusterConfig) -> str:
    return f"http://{config.http_host}:{config.http_port}"


def _grpc_address(config: ClusterConfig) -> str:
    return f"{config.grpc_host}:{config.grpc_port}"
