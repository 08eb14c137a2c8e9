"""A worker says to each router, once a second, that it lives and what it has; a new router dials back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

import grpc
from tandem.v1 import worker_pb2 as pb
from tandem.v1 import worker_pb2_grpc as pb_grpc

from cluster.channel import open_channel
from core.membership import WorkerInfo, WorkerLoad
from kv_transfer.membership_codec import encode_info, encode_load
from telemetry.logs import log_state
from telemetry.tasks import end_process

logger = logging.getLogger(__name__)

INTERVAL_S: Final = 1.0
TIMEOUT_S: Final = 2.0
EXIT_REFUSED: Final = 71


async def announce_forever(read_self: Callable[[], tuple[WorkerInfo, WorkerLoad]], router: str) -> None:
    """To the registry at `router`, host:port. FAILED_PRECONDITION ends the process: this incarnation is reported dead,
    or can never belong; so it is with every router."""
    async with open_channel(router) as channel:
        stub, heard = pb_grpc.RouterServiceStub(channel), True
        while True:
            info, load = read_self()
            try:
                request = pb.AnnounceRequest(worker=encode_info(info), load=encode_load(load))
                await stub.Announce(request, timeout=TIMEOUT_S)
                heard = True
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    end_process(EXIT_REFUSED, f"router {router}: {error.details()}", worker_id=info.ref)
                if heard:
                    log_state(logger, logging.WARNING, router=router, state="unreachable")
                heard = False
            await asyncio.sleep(INTERVAL_S)
