"""What `tandem router` and `tandem controller` do: the processes of a cluster on several hosts, run until a signal.

`tandem up` runs the same router and the same controller; there the launcher starts and ends them.
"""

from __future__ import annotations

import asyncio

from cluster.config import ClusterConfig, router_config
from cluster.host_controller import HostController
from cluster.progress import Progress
from cluster.supervisor import run_until_signal
from router.main import RouterProcess
from telemetry.logs import setup_logs


def serve_router(config: ClusterConfig) -> None:
    """Raises: TandemError: it cannot serve. OSError: an address is taken."""
    setup_logs("router")
    progress = Progress()

    async def serve(stop: asyncio.Event) -> None:
        router = RouterProcess()
        try:
            endpoints = await router.start(router_config(config))
            progress.say(f"HTTP {endpoints.http_address}, gRPC {endpoints.grpc_address}, "
                         f"registry {endpoints.registry_address}")  # fmt: skip
            await stop.wait()
            progress.say(f"draining for up to {config.drain_timeout_s:g} s")
        finally:
            await router.stop()
        progress.say("stopped")

    run_until_signal(serve)


def serve_controller(config: ClusterConfig) -> None:
    """Raises: TandemError: Ray cannot be joined, or an error that no worker explains."""
    setup_logs("controller")
    run_until_signal(HostController(config, Progress()).run)
