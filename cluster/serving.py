"""One run of `tandem up`: the launcher, the self check and what the user is told."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from cluster.actors import ProcessPaths
from cluster.api_key import VARIABLE, key_headers
from cluster.completion import PROMPT
from cluster.config import ClusterConfig
from cluster.folders import RunFolders
from cluster.launcher import Launcher
from cluster.progress import Progress
from cluster.self_check import check_parity, check_request
from cluster.status_client import fetch_status
from cluster.supervisor import run_until_signal


def serve(
    config: ClusterConfig, folders: RunFolders, progress: Progress, self_check: bool, paths: ProcessPaths | None = None
) -> None:
    """Serve until the first SIGINT, SIGTERM or SIGHUP; more of them change nothing.

    Raises: TandemError: it did not come up, or the self check failed.
    """

    async def after_start() -> None:
        if self_check:
            await _check(config, progress)
        progress.plain(await _addresses(config))
        progress.say("serving; Ctrl-C stops")

    run_until_signal(lambda stop: Launcher(config, folders, progress, paths).run(stop, after_start))


async def _check(config: ClusterConfig, progress: Progress) -> None:
    async with progress.step("asking for a first token"):
        await check_request(config.http_url, config.served_model_name, max_tokens=1)
    progress.say("first token")
    if config.aggregated:
        await check_request(config.http_url, config.served_model_name)
        progress.plain("parity: not applicable, aggregated: there is no prefill worker; a request works")
        return
    async with progress.step("checking: the same prompts, prefilled on a prefill worker and on the decode worker"):
        parity = await check_parity(config.http_url, config.registry_addresses[0], config.served_model_name)
    progress.plain(parity.line)


async def _addresses(config: ClusterConfig) -> str:
    """How to call what is up."""
    body = json.dumps({"model": config.served_model_name, "prompt": PROMPT, "max_tokens": 16, "temperature": 0})
    message = json.dumps({"text": PROMPT, "sampling": {"temperature": 0}, "stopping": {"max_tokens": 16}})
    status = await fetch_status(config.registry_addresses[0])
    metrics = [f"{item.worker.ref.worker_id} http://{item.worker.metrics_address}/metrics"
               for item in status.workers if item.worker.metrics_address]  # fmt: skip
    # The shell puts the key in. curl and grpcurl spell it alike.
    key, metadata = "", ""
    if key_headers():
        bearer = f"Bearer ${VARIABLE}"
        key, metadata = f' -H "Authorization: {bearer}"', f", metadata=[('authorization', '{bearer}')]"
    call = (
        "import grpc; from tandem.v1 import inference_pb2 as m, inference_pb2_grpc as s; "
        f"stub = s.InferenceServiceStub(grpc.insecure_channel('{config.grpc_address}')); "
        f"print(''.join(r.text for r in stub.Generate(m.GenerateRequest(text='{PROMPT}', "
        f"sampling=m.Sampling(temperature=0), stopping=m.Stopping(max_tokens=16)){metadata})))"
    )
    tandem = Path(sys.executable).with_name("tandem")
    others = [config.of_router(index) for index in range(1, config.num_routers)]
    return "\n".join([
        "",
        f"  curl {config.http_url}/v1/completions -H 'Content-Type: application/json'{key} -d '{body}'",
        "",
        f"  grpcurl -plaintext{key} -d '{message}' {config.grpc_address} tandem.v1.InferenceService/Generate",
        f'  {sys.executable} -c "{call}"',
        "",
        *(f"  another router: {other.http_url}, gRPC {other.grpc_address}" for other in others),
        f"  metrics: router {config.http_url}/metrics",
        *(f"           {line}" for line in sorted(metrics)),
        "           a worker that is started anew listens elsewhere: `tandem status`",
        f"  in another terminal: {tandem} chat --url {config.http_url}",
        f"                       {tandem} status --registry {','.join(config.registry_addresses)}",
        f"                       {tandem} drain decode-0 --controller {config.controller_address}",
        "",
    ])  # fmt: skip
