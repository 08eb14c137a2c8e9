"""tandem.v1.ControllerService: drains and role switches, for people and for whoever scales."""

from __future__ import annotations

import time
from typing import Final

import grpc
from tandem.v1 import controller_pb2 as pb
from tandem.v1 import controller_pb2_grpc as pb_grpc

from cluster.config import ClusterConfig
from cluster.controller import Controller
from cluster.fleet import DrainRefused, RefusalReason
from core.errors import BadRequest
from kv_transfer.membership_codec import decode_role

MAX_TIMEOUT_S: Final = 3600.0

OUTCOMES: Final = {
    RefusalReason.UNKNOWN_WORKER: pb.DRAIN_OUTCOME_UNKNOWN_WORKER,
    RefusalReason.NOT_READY: pb.DRAIN_OUTCOME_NOT_READY,
    RefusalReason.BUSY: pb.DRAIN_OUTCOME_BUSY,
    RefusalReason.LAST_DECODE_WORKER: pb.DRAIN_OUTCOME_LAST_DECODE_WORKER,
    RefusalReason.NOT_DRAINED: pb.DRAIN_OUTCOME_NOT_DRAINED,
    RefusalReason.WORKER_LOST: pb.DRAIN_OUTCOME_WORKER_LOST,
}


class ControllerServicer(pb_grpc.ControllerServiceServicer):
    """Over one controller, in its event loop."""

    def __init__(self, controller: Controller, drain_timeout_s: float) -> None:
        self._controller = controller
        self._drain_timeout_s = drain_timeout_s

    async def DrainWorker(
        self, request: pb.DrainWorkerRequest, context: grpc.aio.ServicerContext
    ) -> pb.DrainWorkerResponse:
        """INVALID_ARGUMENT: names the field."""
        started_s = time.monotonic()
        try:
            role = decode_role(request.role) if request.HasField("role") else None
            if not 0.0 <= request.timeout_s <= MAX_TIMEOUT_S:
                raise BadRequest("timeout_s", f"must be in [0, {MAX_TIMEOUT_S:g}], got {request.timeout_s:g}")
        except BadRequest as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        try:
            timeout_s = request.timeout_s or self._drain_timeout_s
            changed = await self._controller.drain(request.worker_id, role, force=request.force, timeout_s=timeout_s)
            outcome, message = pb.DRAIN_OUTCOME_DONE if changed else pb.DRAIN_OUTCOME_UNCHANGED, ""
        except DrainRefused as error:
            outcome, message = OUTCOMES[error.reason], str(error)
        return pb.DrainWorkerResponse(outcome=outcome, message=message, duration_s=time.monotonic() - started_s)


async def listen_controller(controller: Controller, config: ClusterConfig) -> grpc.aio.Server:
    """Listen; the caller stops it. Raises: BadRequest: the address cannot be listened on."""
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    pb_grpc.add_ControllerServiceServicer_to_server(ControllerServicer(controller, config.drain_timeout_s), server)
    try:
        server.add_insecure_port(config.controller_address)
    except RuntimeError:  # gRPC has written why to stderr
        message = f"{config.controller_address} cannot be listened on; something else may listen there"
        raise BadRequest("controller_port", message) from None
    await server.start()
    return server
