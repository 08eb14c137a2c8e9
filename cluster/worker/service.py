"""tandem.v1.WorkerService: routers' streams and peers' handshakes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Final

import grpc
from google.protobuf.message import DecodeError
from tandem.v1 import worker_pb2 as pb
from tandem.v1 import worker_pb2_grpc as pb_grpc

from cluster.worker.router_streams import RouterStream, RouterStreams
from core.errors import BadRequest, PeerRefused
from core.membership import WorkerRef
from core.messages import Command
from kv_transfer.membership_codec import decode_ref
from kv_transfer.pool import PoolDescription, require_compatible
from kv_transfer.pool_codec import decode_pool, encode_pool
from kv_transfer.stream_codec import decode_command, encode_answer
from telemetry.logs import log_state
from telemetry.tasks import Spawn

logger = logging.getLogger(__name__)

ROUTER_SILENCE_S: Final = 15.0  # three heartbeats
HELLO_TIMEOUT_S: Final = 10.0  # a stream that has not said whom it means by then is nobody's


class WorkerServicer(pb_grpc.WorkerServiceServicer):
    """on_open: a router's stream is open. on_command: one command of it. on_closed: these requests have no owner any
    more. spawn: runs a task and watches over it: an error of ours in a command must not pass for a broken stream."""

    def __init__(
        self,
        ref: WorkerRef,
        description: PoolDescription,
        streams: RouterStreams,
        on_open: Callable[[], None],
        on_command: Callable[[RouterStream, Command], None],
        on_closed: Callable[[list[str]], None],
        spawn: Spawn,
    ) -> None:
        self._ref = ref
        self._description = description
        self._streams = streams
        self._on_open = on_open
        self._on_command = on_command
        self._on_closed = on_closed
        self._spawn = spawn

    async def Connect(
        self, requests: AsyncIterator[pb.ConnectRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.ConnectResponse]:
        """Refused with FAILED_PRECONDITION when the first message is no hello to this very incarnation."""
        hello = None
        with suppress(TimeoutError):
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                hello = await anext(aiter(requests), None)
        if hello is None or not hello.HasField("hello") or decode_ref(hello.hello.worker) != self._ref:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"hello.worker: this is {self._ref}")
            return
        stream, orphans = self._streams.open(hello.hello.router_id)
        self._on_closed(orphans)
        log_state(logger, router_id=stream.router_id, state="connected")
        reader = self._spawn(self._read(stream, requests))
        try:
            self._on_open()
            while (answer := await stream.outbox.get()) is not None:
                yield encode_answer(answer)  # and come back once it is written
                stream.outbox.task_done()
        finally:
            reader.cancel()
            log_state(logger, router_id=stream.router_id, state="disconnected")
            self._on_closed(self._streams.close(stream))

    async def Handshake(self, request: pb.HandshakeRequest, context: grpc.aio.ServicerContext) -> pb.HandshakeResponse:
        """Compare before any byte moves; FAILED_PRECONDITION names the field that differs."""
        try:
            require_compatible(self._description, decode_pool(request.peer))
        except PeerRefused as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return pb.HandshakeResponse(peer=encode_pool(self._description))

    async def _read(self, stream: RouterStream, requests: AsyncIterator[pb.ConnectRequest]) -> None:
        try:
            await self._commands(stream, aiter(requests))
        except TimeoutError:
            # A frozen router's stream does not break by itself, and may be too full for another word of ours.
            log_state(logger, logging.ERROR, router_id=stream.router_id, state="silent")
        except (BadRequest, DecodeError, grpc.aio.BaseError) as error:
            log_state(logger, logging.ERROR, router_id=stream.router_id, state="refused", reason=str(error))
        self._on_closed(self._streams.close(stream))

    async def _commands(self, stream: RouterStream, requests: AsyncIterator[pb.ConnectRequest]) -> None:
        while True:
            async with asyncio.timeout(ROUTER_SILENCE_S):
                message = await anext(requests, None)
            if message is None or not self._streams.is_open(stream):
                return
            if not message.HasField("heartbeat"):
                self._on_command(stream, decode_command(message))
