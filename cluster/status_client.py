"""Asks routers what they see, and tells them who died."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import grpc
from tandem.v1 import worker_pb2, worker_pb2_grpc

from cluster.channel import open_channel
from cluster.config import ClusterConfig
from cluster.routers import look_up
from cluster.wrong_port import grpc_failure
from core.errors import Unreachable
from core.membership import Life, Role, WorkerRef
from kv_transfer.membership_codec import encode_ref

TIMEOUT_S: Final = 5.0


async def fetch_status(address: str) -> worker_pb2.GetStatusResponse:
    """Raises: Unreachable."""
    async with open_channel(address) as channel:
        try:
            stub = worker_pb2_grpc.RouterServiceStub(channel)
            status: worker_pb2.GetStatusResponse = await stub.GetStatus(
                worker_pb2.GetStatusRequest(), timeout=TIMEOUT_S
            )
            return status
        except grpc.aio.AioRpcError as error:
            raise _unreachable(address, error) from None


async def fetch_all(names: Sequence[str]) -> dict[str, worker_pb2.GetStatusResponse | None]:
    """What each router says, by its address; None where one does not answer.

    Raises: Unreachable: none does. BadRequest: a name is no host:port.
    """
    statuses: dict[str, worker_pb2.GetStatusResponse | None] = {}
    failure = Unreachable("no router has an address")
    for name in names:
        try:
            for address in sorted(await look_up(name)):
                statuses[address] = None
                statuses[address] = await fetch_status(address)
        except Unreachable as error:
            failure = error
        except (OSError, TimeoutError) as error:
            failure = Unreachable(f"router at {name}: {error}")
    if not any(statuses.values()):
        raise failure
    return statuses


async def report_death(address: str, ref: WorkerRef) -> None:
    """Say that the process of this life has ended. Raises: Unreachable: it was not heard."""
    request = worker_pb2.ReportDeathRequest(worker=encode_ref(ref))
    async with open_channel(address) as channel:
        try:
            await worker_pb2_grpc.RouterServiceStub(channel).ReportDeath(request, timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise _unreachable(address, error) from None


def _unreachable(address: str, error: grpc.aio.AioRpcError) -> Unreachable:
    return Unreachable(f"router at {address}: {grpc_failure(error, address, 'registry_port')}")


def missing(status: worker_pb2.GetStatusResponse, config: ClusterConfig) -> str:
    """What a full cluster still lacks in the router's view; empty when nothing."""
    ready = {item.worker.ref.worker_id: item for item in status.workers if item.life == Life.READY}
    absent = [worker_id for worker_id in config.roles if worker_id not in ready]
    if absent:
        return f"{', '.join(absent)} not registered"
    by_role = {role: [name for name, its in config.roles.items() if its is role] for role in Role}
    unconnected = [
        f"{prefill}-{decode}"
        for prefill in by_role[Role.PREFILL]
        for decode in by_role[Role.DECODE]
        if decode not in _peers(ready[prefill]) or prefill not in _peers(ready[decode])
    ]
    return f"{', '.join(unconnected)} not connected" if unconnected else ""


def _peers(item: worker_pb2.WorkerStatus) -> set[str]:
    return {peer.peer.worker_id for peer in item.peers}
