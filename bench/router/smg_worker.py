"""A worker that smg can use, without a model: `smg-python smg_worker.py PORT MODEL_FOLDER TOKEN_ID...`.

It speaks vllm.grpc.engine.VllmEngine and answers at once, each token in a message, as many as are read.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as pb_grpc

MAX_TOKENS = 1 << 17


class SmgWorker(pb_grpc.VllmEngineServicer):
    def __init__(self, folder: str, token_ids: list[int]) -> None:
        self._folder = folder
        self._token_ids = token_ids

    async def HealthCheck(self, _request: Any, _context: Any) -> Any:
        return pb.HealthCheckResponse(healthy=True)

    async def GetModelInfo(self, _request: Any, _context: Any) -> Any:
        return pb.GetModelInfoResponse(
            served_model_name="stub",
            model_path="stub",
            tokenizer_path=self._folder,
            is_generation=True,
            max_context_length=MAX_TOKENS,
            max_req_input_len=MAX_TOKENS,
            vocab_size=49152,
            model_type="llama",
            eos_token_ids=[2],
            bos_token_id=1,
        )

    async def GetServerInfo(self, _request: Any, _context: Any) -> Any:
        return pb.GetServerInfoResponse(server_type="vllm-grpc", data_parallel_size=1, block_size=16, max_num_seqs=256)

    async def GetLoads(self, _request: Any, _context: Any) -> Any:
        return pb.GetLoadsResponse(dp_rank_count=1, loads=[pb.SchedulerLoad(max_running_requests=256)])

    async def SubscribeKvEvents(self, _request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        await context.send_initial_metadata(())
        await asyncio.Event().wait()
        yield

    async def Abort(self, _request: Any, _context: Any) -> Any:
        return pb.AbortResponse()

    async def Generate(self, request: Any, _context: Any) -> AsyncIterator[Any]:
        num_prompt, wanted = len(request.tokenized.input_ids), request.sampling_params.max_tokens
        for position in range(wanted):
            chunk = pb.GenerateStreamChunk(
                token_ids=[self._token_ids[position % len(self._token_ids)]],
                prompt_tokens=num_prompt,
                completion_tokens=1,
            )
            yield pb.GenerateResponse(chunk=chunk)
        complete = pb.GenerateComplete(finish_reason="length", prompt_tokens=num_prompt, completion_tokens=wanted)
        yield pb.GenerateResponse(complete=complete)


async def main(port: str, folder: str, token_ids: list[int]) -> None:
    options = (
        ("grpc.max_receive_message_length", 64 << 20),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_ping_strikes", 0),
    )
    server = grpc.aio.server(options=options)
    pb_grpc.add_VllmEngineServicer_to_server(SmgWorker(folder, token_ids), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], [int(item) for item in sys.argv[3:]]))
