"""A client that streams completions over either front of a router."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import grpc
from tandem.v1 import inference_pb2 as pb

from bench.router.gateways import Gateway
from bench.servers import ServerFailed

Send = Callable[[Gateway, str, int], Awaitable[tuple[float, int]]]  # prompt, max_tokens: seconds to first, tokens


class Client:
    """Streams completions over either front; says when the first token came, and how many there were."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def http(self, gateway: Gateway, prompt: str, max_tokens: int) -> tuple[float, int]:
        body: dict[str, Any] = {"model": gateway.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        body |= {"stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}
        raw = json.dumps(body).encode()
        first_s, tail = 0.0, b""
        begun_s = time.perf_counter()
        headers = {"Content-Type": "application/json"}
        async with self._session.post(f"{gateway.url}/v1/completions", data=raw, headers=headers) as response:
            if response.status != 200:
                raise ServerFailed(f"{gateway.name}: {response.status} {await response.text()}")
            async for piece in response.content.iter_any():
                first_s = first_s or time.perf_counter() - begun_s
                tail = (tail + piece)[-2000:]
        events = [item.removeprefix(b"data: ") for item in tail.split(b"\n\n")]
        counts = [json.loads(event)["usage"] for event in events if b'"completion_tokens"' in event]
        return first_s, counts[-1]["completion_tokens"] if counts else 0

    async def grpc(self, gateway: Gateway, prompt: str, max_tokens: int) -> tuple[float, int]:
        assert gateway.grpc_address is not None
        channel = self._channels.get(gateway.grpc_address)
        if channel is None:
            channel = grpc.aio.insecure_channel(gateway.grpc_address)
            self._channels[gateway.grpc_address] = channel
        call = channel.unary_stream(
            "/tandem.v1.InferenceService/Generate", request_serializer=pb.GenerateRequest.SerializeToString
        )
        request = pb.GenerateRequest(
            text=prompt,
            sampling=pb.Sampling(temperature=0.0),
            stopping=pb.Stopping(max_tokens=max_tokens, ignore_eos=True),
        )
        first_s, last = 0.0, b""
        begun_s = time.perf_counter()
        async for message in call(request):
            last = message
            first_s = first_s or time.perf_counter() - begun_s
        return first_s, pb.GenerateResponse.FromString(last).usage.completion_tokens

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
