"""Workers and routers without weights or KV: what runs inside the actors when only their life is tested."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc
from aiohttp import web
from tandem.v1 import worker_pb2, worker_pb2_grpc

from cluster.worker.config import WorkerConfig
from core.errors import BadRequest
from core.membership import Role, WorkerInfo, WorkerRef
from router.config import RouterConfig
from tests.worker_info import worker_info

BLOCK_BYTES = 1024
BLOCKS_MOVED = 3
ANNOUNCE_EVERY_S = 0.05
STUCK_S = 60.0


class StubWorkerProcess:
    """Listens on a free port and, when told of a router, announces itself to it."""

    async def start(self, config: WorkerConfig) -> WorkerInfo:
        if config.model_folder.name == "broken":
            raise BadRequest("model_folder", "has no weights")
        self._server = await asyncio.start_server(lambda *_: None, config.worker_host, 0)
        port = self._server.sockets[0].getsockname()[1]
        ref = WorkerRef(config.worker_id, config.incarnation)
        address = f"{config.worker_host}:{port}"
        self._announcing = asyncio.gather(*(_announce(config, address, router) for router in config.router_addresses))
        return worker_info(ref, config.role, address=address, num_blocks=config.num_blocks)

    async def drain(self, _timeout_s: float, _finish_s: float) -> str:
        self._announcing.cancel()
        return ""

    async def switch_role(self, role: Role, timeout_s: float, _finish_s: float) -> str:
        """Does so, unless it is given little time; much of it is taken."""
        if timeout_s >= STUCK_S:
            await asyncio.Event().wait()
        return f"not idle in time: no {role}" if timeout_s < 1.0 else ""

    async def stop(self) -> None:
        self._server.close()


async def _announce(config: WorkerConfig, address: str, router: str) -> None:
    if router == "nowhere:0":
        return
    worker = worker_pb2.WorkerInfo(
        ref=worker_pb2.WorkerRef(worker_id=config.worker_id, incarnation=config.incarnation),
        role=worker_pb2.ROLE_PREFILL if config.role is Role.PREFILL else worker_pb2.ROLE_DECODE,
        address=address,
        block_bytes=BLOCK_BYTES,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        max_context_tokens=config.num_blocks * config.block_size,
    )
    async with grpc.aio.insecure_channel(router) as channel:
        stub = worker_pb2_grpc.RouterServiceStub(channel)
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await stub.Announce(worker_pb2.AnnounceRequest(worker=worker))
            await asyncio.sleep(ANNOUNCE_EVERY_S)


class StubRouterProcess:
    """Remembers who announced itself, and answers every prompt with the same tokens."""

    async def start(self, config: RouterConfig) -> None:
        self._grpc = grpc.aio.server()
        worker_pb2_grpc.add_RouterServiceServicer_to_server(StubRouterService(), self._grpc)
        self._grpc.add_insecure_port(f"{config.registry_host}:{config.registry_port}")
        await self._grpc.start()
        self._http = web.AppRunner(completions_app())
        await self._http.setup()
        await web.TCPSite(self._http, config.http_host, config.http_port).start()

    async def stop(self) -> None:
        await self._http.cleanup()
        await self._grpc.stop(0.1)


class StubRouterService(worker_pb2_grpc.RouterServiceServicer):
    """Every announced worker is READY and connected to all others."""

    def __init__(self, used_blocks: int = 0) -> None:
        self._workers: dict[str, Any] = {}
        self._used_blocks = used_blocks

    async def Announce(self, request: Any, _context: Any) -> Any:
        self._workers[request.worker.ref.worker_id] = request.worker
        return worker_pb2.AnnounceResponse()

    async def GetStatus(self, _request: Any, _context: Any) -> Any:
        load = worker_pb2.WorkerLoad(used_blocks=self._used_blocks)
        return worker_pb2.GetStatusResponse(
            workers=[
                worker_pb2.WorkerStatus(worker=worker, life="ready", load=load, peers=self._peers_of(worker))
                for worker in self._workers.values()
            ]
        )

    def _peers_of(self, worker: Any) -> list[Any]:
        others = [other.ref for other in self._workers.values() if other.role != worker.role]
        return [worker_pb2.PeerConnected(peer=ref, lane="cma", probe_gbps=5.0) for ref in others]


def completions_app(remote_token: int = 7, kv_bytes_moved: int = BLOCKS_MOVED * BLOCK_BYTES) -> web.Application:
    """POST /v1/completions: token 7 each time; after a remote prefill, `remote_token` and some moved KV."""

    async def completions(request: web.Request) -> web.Response:
        body = await request.json()
        remote = body["tandem"]["prefill"] == "remote"
        moved = {"kv_blocks_moved": BLOCKS_MOVED, "kv_bytes_moved": kv_bytes_moved} if remote else {}
        token_ids = [7] * (body["max_tokens"] - 1) + [remote_token if remote else 7]
        return web.json_response({"choices": [{"token_ids": token_ids}], "usage": {"tandem": moved}})

    app = web.Application()
    app.router.add_post("/v1/completions", completions)
    return app
