"""tandem.v1.RouterService: workers announce themselves, their keeper reports deaths, people ask for the state."""

from __future__ import annotations

from typing import Final

import grpc
from tandem.v1 import worker_pb2 as pb
from tandem.v1 import worker_pb2_grpc as pb_grpc

from core.errors import BadRequest
from core.membership import Life
from kv_transfer.membership_codec import decode_info, decode_load, decode_ref, encode_info, encode_load, encode_ref
from router.live import LiveDispatcher
from router.worker_view import WorkerView

DRAINED: Final = "drained"
SERVICE_NAME: Final = pb.DESCRIPTOR.services_by_name["RouterService"].full_name


class RegistryServicer(pb_grpc.RouterServiceServicer):
    """Registration and state of one router."""

    def __init__(self, dispatcher: LiveDispatcher) -> None:
        self._dispatcher = dispatcher

    async def Announce(self, request: pb.AnnounceRequest, context: grpc.aio.ServicerContext) -> pb.AnnounceResponse:
        """FAILED_PRECONDITION: this worker can never belong here, and should end."""
        try:
            self._dispatcher.announce(decode_info(request.worker), decode_load(request.load))
        except BadRequest as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return pb.AnnounceResponse()

    async def ReportDeath(
        self, request: pb.ReportDeathRequest, _context: grpc.aio.ServicerContext
    ) -> pb.ReportDeathResponse:
        await self._dispatcher.report_death(decode_ref(request.worker))
        return pb.ReportDeathResponse()

    async def GetStatus(
        self, _request: pb.GetStatusRequest, _context: grpc.aio.ServicerContext
    ) -> pb.GetStatusResponse:
        workers = [worker_status(worker) for worker in self._dispatcher.view.workers()]
        return pb.GetStatusResponse(
            workers=workers,
            open_requests=self._dispatcher.num_open,
            queued_requests=self._dispatcher.num_queued,
            router_id=self._dispatcher.router_id,
        )


def worker_status(worker: WorkerView) -> pb.WorkerStatus:
    """As people are told: its life is DRAINED once it drains and nothing of it is left."""
    peers = [
        pb.PeerConnected(peer=encode_ref(link.peer), lane=link.lane, probe_gbps=link.probe_gbps)
        for link in worker.peers.values()
    ]
    life = DRAINED if worker.life is Life.DRAINING and worker.is_idle else worker.life
    return pb.WorkerStatus(worker=encode_info(worker.info), life=life, load=encode_load(worker.load), peers=peers)
