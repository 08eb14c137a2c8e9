"""A worker of Tandem without a model: `python -m bench.router.stub_worker REGISTRY STEP_S TOKEN_ID...`.

It announces itself as a decode worker, computes nothing, and gives each open request one token a step, as an engine
does: a step each STEP_S seconds, or with 0 as many as the router reads. The tokens are those named, in turn.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import suppress

import grpc
from tandem.v1 import worker_pb2 as pb
from tandem.v1 import worker_pb2_grpc as pb_grpc

from core.membership import Role, WorkerInfo, WorkerLoad, WorkerRef
from core.messages import CancelRequest, StartGeneration, StepOutput
from core.request import FinishReason, TokenDelta, WorkUsage
from kv_transfer.membership_codec import encode_info
from kv_transfer.stream_codec import decode_command, encode_answer

IDLE_S = 1.0  # what silence of ours would be taken for death


class StubWorker(pb_grpc.WorkerServiceServicer):
    def __init__(self, step_s: float, token_ids: list[int]) -> None:
        self._step_s = step_s
        self._token_ids = token_ids
        self._open: dict[str, tuple[int, int]] = {}  # tokens out and tokens wanted, by attempt
        self._prompts: dict[str, int] = {}  # lengths of those whose first token is not out
        self._news = asyncio.Event()

    async def Connect(
        self, requests: AsyncIterator[pb.ConnectRequest], _context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.ConnectResponse]:
        reader = asyncio.create_task(self._read(requests))
        try:
            while True:
                yield encode_answer(StepOutput(tuple(self._step()), WorkerLoad(free_blocks=1 << 20)))
                if self._step_s:
                    await asyncio.sleep(self._step_s)
                if not self._open:
                    self._news.clear()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(IDLE_S):
                            await self._news.wait()
        finally:
            reader.cancel()

    async def _read(self, requests: AsyncIterator[pb.ConnectRequest]) -> None:
        async for message in requests:
            if message.WhichOneof("message") in ("hello", "heartbeat"):
                continue
            match decode_command(message):
                case StartGeneration(request):
                    self._prompts[request.request_id] = request.num_prompt_tokens
                    self._open[request.request_id] = (0, request.stop.max_tokens)
                    self._news.set()
                case CancelRequest(request_id):
                    self._open.pop(request_id, None)

    def _step(self) -> list[TokenDelta]:
        deltas = []
        for request_id, (position, wanted) in list(self._open.items()):
            token_id = self._token_ids[position % len(self._token_ids)]
            prompt = self._prompts.pop(request_id, None)
            last = position + 1 == wanted
            deltas.append(
                TokenDelta(
                    request_id,
                    position,
                    (token_id,),
                    FinishReason.LENGTH if last else None,
                    usage=None if prompt is None else WorkUsage(computed_tokens=prompt),
                )
            )
            if last:
                del self._open[request_id]
            else:
                self._open[request_id] = (position + 1, wanted)
        return deltas


async def main(registry: str, step_s: float, token_ids: list[int]) -> None:
    server = grpc.aio.server(options=(("grpc.max_receive_message_length", 64 << 20),))
    pb_grpc.add_WorkerServiceServicer_to_server(StubWorker(step_s, token_ids), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    ref = WorkerRef(f"decode-{port}", "1")
    info = WorkerInfo(ref, Role.DECODE, f"127.0.0.1:{port}", bytes(32), 16, 1 << 20, 1 << 20, 1 << 17)
    async with grpc.aio.insecure_channel(registry) as channel:
        stub = pb_grpc.RouterServiceStub(channel)
        while True:
            with suppress(grpc.aio.AioRpcError):  # the router starts, or ends
                await stub.Announce(pb.AnnounceRequest(worker=encode_info(info)), timeout=IDLE_S)
            await asyncio.sleep(IDLE_S)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2]), [int(item) for item in sys.argv[3:]]))
