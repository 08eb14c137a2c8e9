"""The self check must fail when something is wrong: wrong tokens, no KV, miscounted KV, lost blocks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc
import pytest
from aiohttp import web
from stub_processes import BLOCK_BYTES, BLOCKS_MOVED, StubRouterService, completions_app
from tandem.v1 import worker_pb2, worker_pb2_grpc

from cluster import self_check
from cluster.self_check import LINES, MAX_TOKENS, SHORT, check_parity, check_request, prompts_within
from core.errors import CommandFailed

CONTEXT: Final = {"block_size": 16, "num_blocks": 1024, "max_context_tokens": 8192}


@asynccontextmanager
async def running(app: web.Application, service: StubRouterService) -> AsyncIterator[tuple[str, str]]:
    """Serve both on free ports; yields the HTTP url and the gRPC address."""
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server = grpc.aio.server()
    worker_pb2_grpc.add_RouterServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    for worker_id, role in (("prefill-0", worker_pb2.ROLE_PREFILL), ("decode-0", worker_pb2.ROLE_DECODE)):
        ref = worker_pb2.WorkerRef(worker_id=worker_id, incarnation="1")
        worker = worker_pb2.WorkerInfo(ref=ref, role=role, block_bytes=BLOCK_BYTES, **CONTEXT)
        await service.Announce(worker_pb2.AnnounceRequest(worker=worker), None)
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", f"127.0.0.1:{port}"
    finally:
        await runner.cleanup()
        await server.stop(0)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "REPORT_PERIOD_S", 0.1)
    monkeypatch.setattr(self_check, "SETTLE_TIMEOUT_S", 0.3)


async def test_a_sound_cluster_passes() -> None:
    async with running(completions_app(), StubRouterService()) as (url, address):
        parity = await check_parity(url, address, "tiny")
    moved = 3 * BLOCKS_MOVED
    assert (parity.kv_blocks, parity.kv_bytes) == (moved, moved * BLOCK_BYTES)
    assert parity.line == (
        "parity: aggregated == disaggregated (96/96 tokens), KV moved 0.0 MiB by NIXL/cma, 0 orphaned blocks"
    )


@pytest.mark.parametrize(
    ("app_settings", "used_blocks", "message"),
    [
        ({"remote_token": 8}, 0, "aggregated != disaggregated (93/96 tokens)"),
        ({"kv_bytes_moved": 0}, 0, "no KV moved"),
        ({"kv_bytes_moved": 1000}, 0, "blocks of 1024 bytes moved, but 3000 bytes were counted"),
        ({}, 2, "4 orphaned blocks: blocks stayed behind"),
    ],
)
async def test_a_fault_fails_the_check(app_settings: dict[str, Any], used_blocks: int, message: str) -> None:
    async with running(completions_app(**app_settings), StubRouterService(used_blocks)) as (url, address):
        with pytest.raises(CommandFailed) as caught:
            await check_parity(url, address, "tiny")
    assert message in str(caught.value)


def test_its_prompts_fit_the_context_whatever_the_tokenizer_makes_of_them() -> None:
    assert prompts_within(8192)[-1].count("\n") == len(LINES)
    assert prompts_within(64) == SHORT
    for context_tokens in (100, 128, 500, 1024):
        *short, long = prompts_within(context_tokens)
        assert tuple(short) == SHORT
        assert (
            len(long.encode()) + 1 + MAX_TOKENS <= context_tokens < len(long.encode()) + 1 + MAX_TOKENS + len(LINES[-1])
        )


async def test_where_a_key_comes_from_is_said_when_one_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(_request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "an API key is needed"}}, status=401)

    monkeypatch.delenv("TANDEM_API_KEY", raising=False)
    app = web.Application()
    app.router.add_post("/v1/completions", refuse)
    async with running(app, StubRouterService()) as (url, _):
        with pytest.raises(CommandFailed, match="an API key is needed; TANDEM_API_KEY in the environment is not"):
            await check_request(url, "tiny")


async def test_an_error_of_the_front_is_shown() -> None:
    async with running(web.Application(), StubRouterService()) as (url, _):
        with pytest.raises(CommandFailed, match="HTTP 404"):
            await check_request(url, "tiny")
    with pytest.raises(CommandFailed, match="ClientConnectorError"):
        await check_request(url, "tiny")
