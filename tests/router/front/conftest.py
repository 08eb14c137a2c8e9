"""Both fronts on real sockets over one scripted dispatcher."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass

import aiohttp
import grpc
import openai
import pytest
from aiohttp import web
from front_fakes import CREATED_S, MODEL, ByteTokenizer, ScriptedDispatcher, check_grammar
from prometheus_client import CollectorRegistry

from router.admission.policy import Band
from router.front.generation import Front
from router.front.grpc_service import GrpcFront, build_grpc_server
from router.front.openai_http import build_http_app, build_http_runner
from telemetry.router_metrics import RouterMetrics
from telemetry.slo_metrics import SloTargets


@dataclass
class Switch:
    """A readiness that a test can turn."""

    reason: str | None = None

    def __call__(self) -> str | None:
        return self.reason


@pytest.fixture
def readiness() -> Switch:
    return Switch()


@pytest.fixture
def metrics() -> RouterMetrics:
    return RouterMetrics(CollectorRegistry(), MODEL.name, SloTargets(ttft_s=2.5, itl_s=0.1), tuple(Band))


@pytest.fixture
async def dispatcher() -> ScriptedDispatcher:
    return ScriptedDispatcher()


@pytest.fixture
async def front(dispatcher: ScriptedDispatcher, metrics: RouterMetrics) -> Front:
    numbers = itertools.count(1)
    return Front(
        dispatcher,
        ByteTokenizer(),
        MODEL,
        metrics,
        check_grammar,
        wall_clock=lambda: CREATED_S,
        new_request_id=lambda: f"r{next(numbers)}",
    )


@pytest.fixture
async def http_port(front: Front, readiness: Switch) -> AsyncIterator[int]:
    runner = build_http_runner(build_http_app(front, readiness))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield runner.addresses[0][1]
    await runner.cleanup()


@pytest.fixture
async def http(http_port: int) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(base_url=f"http://127.0.0.1:{http_port}") as session:
        yield session


@pytest.fixture
async def client(http_port: int) -> AsyncIterator[openai.AsyncOpenAI]:
    """The real client, unchanged."""
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{http_port}/v1", api_key="x", max_retries=0) as client:
        yield client


@pytest.fixture
async def grpc_front(front: Front, readiness: Switch) -> AsyncIterator[tuple[GrpcFront, int]]:
    built = build_grpc_server(front, readiness)
    port = built.server.add_insecure_port("127.0.0.1:0")
    await built.server.start()
    yield built, port
    await built.server.stop(None)


@pytest.fixture
async def channel(grpc_front: tuple[GrpcFront, int]) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{grpc_front[1]}") as channel:
        yield channel
