"""One router-worker stream: commands out, answers in, and how it ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import grpc
from tandem.v1 import worker_pb2 as pb
from tandem.v1 import worker_pb2_grpc as pb_grpc

from core.errors import BadRequest
from core.membership import WorkerInfo
from core.messages import Answer, Command
from kv_transfer.membership_codec import encode_ref
from kv_transfer.stream_codec import decode_answer, encode_command
from telemetry.tasks import Spawn

logger = logging.getLogger(__name__)

CHANNEL_OPTIONS: Final = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.enable_http_proxy", 0),
)

CLOSE_TIMEOUT_S: Final = 5.0
HEARTBEAT_S: Final = 5.0


class WorkerLink:
    """Dials a worker and keeps one stream to it until it breaks, stays silent, or is closed.

    on_open: the worker accepted the stream. on_answer: one answer. on_closed: it is over, called once, with why.
    All are called in the event loop. spawn: runs a task and watches over it.
    """

    def __init__(
        self,
        info: WorkerInfo,
        router_id: str,
        silence_timeout_s: float,
        on_open: Callable[[], None],
        on_answer: Callable[[Answer], None],
        on_closed: Callable[[str], None],
        spawn: Spawn,
    ) -> None:
        self.info = info
        self._router_id = router_id
        self._silence_timeout_s = silence_timeout_s
        self._on_open = on_open
        self._on_answer = on_answer
        self._on_closed = on_closed
        self._outbox: asyncio.Queue[pb.ConnectRequest] = asyncio.Queue()
        self._spawn = spawn
        self._task = spawn(self._run())

    def send(self, command: Command) -> None:
        """Queue a command; order is kept."""
        self._outbox.put_nowait(encode_command(command))

    async def close(self) -> None:
        """End the stream without calling `on_closed`."""
        self._task.cancel()
        await asyncio.wait([self._task], timeout=CLOSE_TIMEOUT_S)

    async def _run(self) -> None:
        reason = "closed by the worker"
        async with grpc.aio.insecure_channel(self.info.address, options=CHANNEL_OPTIONS) as channel:
            try:
                await self._converse(pb_grpc.WorkerServiceStub(channel))
            except TimeoutError:
                reason = f"silent for {self._silence_timeout_s} s"
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
            except (BadRequest, grpc.aio.BaseError) as error:
                reason = str(error)
        self._on_closed(reason)

    async def _converse(self, stub: pb_grpc.WorkerServiceStub) -> None:
        """A worker says its load once a second even when idle, so that silence means a hung process."""
        stream = stub.Connect()
        await stream.write(pb.ConnectRequest(hello=self._hello()))
        writer = self._spawn(self._write_forever(stream))
        try:
            await self._read_forever(stream)
        finally:
            writer.cancel()
            stream.cancel()

    async def _read_forever(self, stream: Any) -> None:
        opened = False
        while True:
            async with asyncio.timeout(self._silence_timeout_s):
                message = await stream.read()
            if message is grpc.aio.EOF:
                return
            if not opened:
                opened = True
                self._on_open()
            if message is None:  # what grpc gives for bytes that it cannot parse
                raise BadRequest("message", "is not a tandem.v1.ConnectResponse")
            self._on_answer(decode_answer(message))

    async def _write_forever(self, stream: Any) -> None:
        """Until cancelled, or until the stream is over, which the reader then sees."""
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await stream.write(await self._next())

    async def _next(self) -> pb.ConnectRequest:
        """A worker that hears nothing from us for long gives back all that came from us."""
        with suppress(TimeoutError):
            async with asyncio.timeout(HEARTBEAT_S):
                return await self._outbox.get()
        return pb.ConnectRequest(heartbeat=pb.Heartbeat())

    def _hello(self) -> pb.RouterHello:
        return pb.RouterHello(router_id=self._router_id, worker=encode_ref(self.info.ref))
