"""A router's stream, on both of its ends: however it ends, the worker lives and its requests are given back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from tandem.v1 import worker_pb2 as pb
from tandem.v1 import worker_pb2_grpc as pb_grpc

from cluster.router_streams import RouterStreams
from cluster.worker_service import WorkerServicer
from core.membership import WorkerLoad, WorkerRef
from core.messages import CancelRequest
from kv_transfer.membership_codec import encode_ref
from kv_transfer.stream_codec import encode_command
from telemetry.tasks import BackgroundTasks

ME = WorkerRef("decode-0", "1")
HELLO = pb.ConnectRequest(hello=pb.RouterHello(router_id="router-0", worker=encode_ref(ME)))


class Worker:
    """What a servicer is given, remembered."""

    def __init__(self) -> None:
        self.streams = RouterStreams()
        self.commands: list[object] = []
        self.closed = asyncio.Event()
        self.broken: list[BaseException] = []
        self.tasks = BackgroundTasks(self.broken.append)

    def servicer(self) -> WorkerServicer:
        return WorkerServicer(
            ME,
            None,  # type: ignore[arg-type]
            self.streams,
            on_open=lambda: self.streams.step((), WorkerLoad()),
            on_command=lambda _stream, command: self.commands.append(command),
            on_closed=lambda _request_ids: self.closed.set(),
            spawn=self.tasks.spawn,
        )


@asynccontextmanager
async def connected(worker: Worker) -> AsyncIterator[Any]:
    """An open stream of a router, which has said hello and heard the load."""
    server = grpc.aio.server()
    pb_grpc.add_WorkerServiceServicer_to_server(worker.servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        options = (("grpc.enable_http_proxy", 0),)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
            stream = pb_grpc.WorkerServiceStub(channel).Connect()
            await stream.write(HELLO)
            assert (await stream.read()).HasField("step")
            yield stream
    finally:
        await server.stop(grace=0)


async def ended(worker: Worker) -> None:
    await asyncio.wait_for(worker.closed.wait(), 5)
    await worker.tasks.settle(timeout_s=5)
    assert worker.broken == []


@pytest.mark.parametrize("how", ["half-closed", "cancelled", "not a command"])
async def test_the_end_of_a_routers_stream_does_not_end_the_worker(how: str) -> None:
    worker = Worker()
    async with connected(worker) as stream:
        await stream.write(encode_command(CancelRequest("r")))
        if how == "cancelled":
            stream.cancel()
        elif how == "half-closed":
            await stream.done_writing()
            assert await asyncio.wait_for(stream.read(), 5) is grpc.aio.EOF
        else:
            await stream.write(pb.ConnectRequest())
            assert await asyncio.wait_for(stream.read(), 5) is grpc.aio.EOF
        await ended(worker)
