"""A worker that is killed as it computes the first prompt that comes: python tell_and_die.py wait|at-once."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import grpc
from tandem.v1 import worker_pb2_grpc as pb_grpc

from cluster.worker.router_streams import RouterStream, RouterStreams
from cluster.worker.service import WorkerServicer
from core.membership import WorkerLoad, WorkerRef
from core.messages import Command, StartGeneration
from engine.block_pool import BlockPool
from engine.cache_changes import CacheChanges
from telemetry.tasks import BackgroundTasks

ME = WorkerRef("decode-0", "1")


async def main() -> None:
    streams, tasks = RouterStreams(BlockPool(1), lambda _request_id: True), BackgroundTasks(sys.exit)

    def command(stream: RouterStream, command: Command) -> None:
        assert isinstance(command, StartGeneration)
        streams.own(stream, command)
        tasks.spawn(compute(command.request.request_id))

    async def compute(request_id: str) -> None:
        for told in streams.computes([request_id], WorkerLoad):
            if sys.argv[1] == "wait":
                await told.outbox.join()
        os.kill(os.getpid(), signal.SIGKILL)

    def opened() -> None:
        streams.step((), WorkerLoad(), CacheChanges((), ()))

    server = grpc.aio.server()
    servicer = WorkerServicer(ME, None, streams, opened, command, lambda _ids: None, tasks.spawn)  # type: ignore[arg-type]
    pb_grpc.add_WorkerServiceServicer_to_server(servicer, server)
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


asyncio.run(main())
