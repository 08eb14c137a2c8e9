"""Calls that are silent for long, and clients that ping as often as they can: neither is ever hung up on."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import grpc
import pytest
from aiohttp import web
from front_fakes import CREATED_S, MODEL, ByteTokenizer, Script, ScriptedDispatcher, check_grammar, says
from prometheus_client import CollectorRegistry
from tandem.v1 import inference_pb2, inference_pb2_grpc

from core.request import GenerateRequest, TokenDelta
from router.admission.policy import Band
from router.front import grpc_service
from router.front.generation import Front
from router.front.grpc_service import build_grpc_server
from router.front.openai_http import build_http_app, build_http_runner
from telemetry.router_metrics import RouterMetrics
from telemetry.slo_metrics import SloTargets

TEN_MINUTES_S = 600.0
SPEED = 300.0
BOUND_S = 10.0
SETTINGS, PING, GOAWAY = 4, 6, 7  # frames of HTTP/2


def says_after(silence_s: float, text: str) -> Script:
    async def script(request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        await asyncio.sleep(silence_s)
        async for delta in says(text)(request):
            yield delta

    return script


def make_front(script: Script) -> Front:
    dispatcher = ScriptedDispatcher()
    dispatcher.script = script
    metrics = RouterMetrics(CollectorRegistry(), MODEL.name, SloTargets(ttft_s=2.5, itl_s=0.1), tuple(Band))
    return Front(dispatcher, ByteTokenizer(), MODEL, metrics, check_grammar, wall_clock=lambda: CREATED_S)


class FastSelector(selectors.DefaultSelector):
    def select(self, timeout: float | None = None) -> Any:
        return super().select(None if timeout is None else timeout / SPEED)


class FastLoop(asyncio.SelectorEventLoop):
    """Its clock, and so every time-out of whatever runs in it, goes SPEED times faster; its sockets are real."""

    def __init__(self) -> None:
        super().__init__(FastSelector())

    def time(self) -> float:
        return super().time() * SPEED


@pytest.mark.parametrize("server_limit_s", [None, TEN_MINUTES_S / 2])
def test_a_unary_http_call_may_be_silent_for_ten_minutes(server_limit_s: float | None) -> None:
    """Shortened: the loop's clock runs 300 times faster. The control: a limit in the server would have ended it."""

    async def ask() -> str:
        app = build_http_app(make_front(says_after(TEN_MINUTES_S, "late")), lambda: None)
        if server_limit_s is not None:
            app.middlewares.append(limited(server_limit_s))
        runner = build_http_runner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/completions"
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
                session.post(url, json={"model": "tiny", "prompt": "hi"}) as response,
            ):
                answer = await response.json()
                assert response.status == 200, answer
                assert loop.time() - begun_s >= TEN_MINUTES_S
                return str(answer["choices"][0]["text"])
        finally:
            await runner.cleanup()

    with asyncio.Runner(loop_factory=FastLoop) as runner:
        if server_limit_s is None:
            assert runner.run(ask()) == "late"
        else:
            with pytest.raises((AssertionError, aiohttp.ClientError)):
                runner.run(ask())


def limited(limit_s: float) -> Any:
    @web.middleware
    async def limit(request: web.Request, handler: Any) -> web.StreamResponse:
        async with asyncio.timeout(limit_s):
            return await handler(request)

    return limit


async def test_a_grpc_call_may_be_silent_for_many_keepalives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortened: the server asks every 50 ms, instead of every 10 s, whether its client lives."""
    options = {**dict(grpc_service.SERVER_OPTIONS), "grpc.keepalive_time_ms": 50, "grpc.keepalive_timeout_ms": 1_000}
    monkeypatch.setattr(grpc_service, "SERVER_OPTIONS", tuple(options.items()))
    built = build_grpc_server(make_front(says_after(2.0, "late")), lambda: None)
    port = built.server.add_insecure_port("127.0.0.1:0")
    await built.server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(inference_pb2.GenerateRequest(text="hi"))
            assert "".join([response.text async for response in call]) == "late"
    finally:
        await built.server.stop(None)


async def ping(num_pings: int) -> list[int]:
    """Types of the frames that a server sends to a client that only pings, one after the other, until it hangs up.

    RFC 9113: a frame is its length in 3 bytes, type, flags, stream in 4, payload.
    """
    built = build_grpc_server(make_front(says("ok")), lambda: None)
    port = built.server.add_insecure_port("127.0.0.1:0")
    await built.server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    types: list[int] = []
    try:
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, SETTINGS, 0, 0, 0, 0, 0]))
        async with asyncio.timeout(BOUND_S):
            while types.count(PING) < num_pings and GOAWAY not in types:
                if not types or types[-1] == PING:
                    writer.write(bytes([0, 0, 8, PING, 0, 0, 0, 0, 0]) + bytes(8))
                header = await reader.readexactly(9)
                await reader.readexactly(int.from_bytes(header[:3]))
                types.append(header[3])
    finally:
        writer.close()
        await built.server.stop(None)
    return types


async def test_a_client_that_pings_as_often_as_it_can_gets_no_goaway() -> None:
    types = await ping(1000)
    assert types.count(PING) == 1000 and GOAWAY not in types


async def test_a_server_with_grpcs_own_options_sends_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: it takes two pings in five minutes, then it hangs up."""
    monkeypatch.setattr(grpc_service, "SERVER_OPTIONS", ())
    assert GOAWAY in await ping(1000)
