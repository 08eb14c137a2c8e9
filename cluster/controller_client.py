"""Asks a cluster's controller (proto/tandem/v1/controller.proto)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import grpc
from tandem.v1 import controller_pb2, controller_pb2_grpc

from cluster.channel import open_channel
from cluster.controller_service import MAX_TIMEOUT_S, OUTCOMES
from cluster.fleet import DrainRefused
from cluster.wrong_port import grpc_failure
from core.errors import BadRequest, Unreachable
from core.membership import Role
from kv_transfer.membership_codec import encode_role

ANSWER_TIMEOUT_S: Final = 60.0  # after the drain's own bound: a worker that hangs is found, and its servers are closed
_REFUSALS: Final = {outcome: reason for reason, outcome in OUTCOMES.items()}


@dataclass(frozen=True, slots=True)
class Drained:
    """changed: False: it served in that role already."""

    changed: bool
    duration_s: float


async def drain_worker(address: str, worker_id: str, role: str | None, force: bool, timeout_s: float) -> Drained:
    """Waits for as long as the drain may take.

    Raises: DrainRefused: the worker is not drained, or does not serve as `role`. BadRequest. Unreachable.
    """
    drain_s = timeout_s if 0.0 < timeout_s < MAX_TIMEOUT_S else MAX_TIMEOUT_S  # 0: the cluster's; others it refuses
    request = controller_pb2.DrainWorkerRequest(worker_id=worker_id, force=force, timeout_s=timeout_s)
    if role is not None:
        request.role = encode_role(Role(role))
    async with open_channel(address) as channel:
        try:
            stub = controller_pb2_grpc.ControllerServiceStub(channel)
            answer = await stub.DrainWorker(request, timeout=drain_s + ANSWER_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                field, _, message = (error.details() or "").partition(": ")
                raise BadRequest(field, message) from None
            message = f"controller at {address}: {grpc_failure(error, address, 'controller_port')}"
            raise Unreachable(message) from None
    if answer.outcome in _REFUSALS:
        raise DrainRefused(_REFUSALS[answer.outcome], answer.message)
    return Drained(answer.outcome == controller_pb2.DRAIN_OUTCOME_DONE, answer.duration_s)
