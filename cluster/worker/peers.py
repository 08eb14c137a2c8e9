"""Keeps a warm KV path to every other worker: handshake, connect, reconnect, until the peer is dead."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

import grpc
from tandem.v1 import worker_pb2 as pb
from tandem.v1 import worker_pb2_grpc as pb_grpc

from cluster.channel import open_channel
from core.errors import PeerRefused, WorkerLost
from core.membership import WorkerInfo, WorkerRef
from core.messages import PeerConnected
from kv_transfer.driver import HandoffDriver
from kv_transfer.pool import PoolDescription
from kv_transfer.pool_codec import decode_pool, encode_pool
from telemetry.logs import log_state
from telemetry.tasks import Spawn

logger = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S: Final = 5.0
CLOSE_TIMEOUT_S: Final = 5.0
FIRST_RETRY_S: Final = 0.1
LAST_RETRY_S: Final = 5.0


class Peers:
    """on_connected hears of every new or renewed path; it goes to the routers.

    spawn: runs a task and watches over it.
    """

    def __init__(
        self, me: PoolDescription, driver: HandoffDriver, on_connected: Callable[[PeerConnected], None], spawn: Spawn
    ) -> None:
        self._me = me
        self._driver = driver
        self._on_connected = on_connected
        self._spawn = spawn
        self._infos: dict[WorkerRef, WorkerInfo] = {}
        self._links: dict[WorkerRef, PeerConnected] = {}
        self._tasks: dict[WorkerRef, asyncio.Task[None]] = {}
        driver.listener.peer_lost = self._lost

    def is_connected(self, ref: WorkerRef) -> bool:
        return ref in self._links

    def joined(self, info: WorkerInfo) -> None:
        """Connect to a worker, or say again that it is connected."""
        self._infos[info.ref] = info
        if info.ref in self._links:
            self._on_connected(self._links[info.ref])
        elif info.ref not in self._tasks:
            self._start(info)

    async def dead(self, ref: WorkerRef) -> None:
        """The peer's process has ended."""
        self._infos.pop(ref, None)
        self._links.pop(ref, None)
        task = self._tasks.pop(ref, None)
        if task is not None:
            task.cancel()
        await self._driver.peer_dead(ref)

    async def close(self) -> None:
        """Stop connecting; waits, bounded, for what is under way."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S)

    def _lost(self, ref: WorkerRef) -> None:
        """The path broke; the peer may live, so try again."""
        if self._links.pop(ref, None) is not None and ref in self._infos:
            self._start(self._infos[ref])

    def _start(self, info: WorkerInfo) -> None:
        self._tasks[info.ref] = self._spawn(self._connect(info))

    async def _connect(self, info: WorkerInfo) -> None:
        retry_s = FIRST_RETRY_S
        while True:
            try:
                link = await self._driver.connect(await self._handshake(info))
                break
            except PeerRefused as error:
                log_state(logger, logging.ERROR, peer=info.ref, state="refused", reason=str(error))
                return
            except (WorkerLost, grpc.aio.AioRpcError) as error:
                log_state(logger, logging.WARNING, peer=info.ref, state="unreachable", reason=str(error))
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, LAST_RETRY_S)
        self._links[info.ref] = link
        self._tasks.pop(info.ref, None)
        log_state(logger, peer=link.peer, state="connected", lane=link.lane, gbps=link.probe_gbps)
        self._on_connected(link)

    async def _handshake(self, info: WorkerInfo) -> PoolDescription:
        """Raises PeerRefused: the peer will not have us; its message names the field."""
        async with open_channel(info.address) as channel:
            request = pb.HandshakeRequest(peer=encode_pool(self._me))
            try:
                response = await pb_grpc.WorkerServiceStub(channel).Handshake(request, timeout=HANDSHAKE_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    raise PeerRefused("handshake", str(self._me.ref), error.details()) from error
                raise
        return decode_pool(response.peer)
