"""Clients that leave and workers that fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import openai
import pytest
from front_fakes import Script, ScriptedDispatcher, floods, says, says_then_hangs, says_then_raises

from core.errors import (
    BadRequest,
    InvariantBroken,
    Rejected,
    RejectReason,
    TandemError,
    TransferFailed,
    WorkerLost,
)
from core.request import FinishReason, GenerateRequest, TokenDelta
from telemetry.router_metrics import RouterMetrics

BODY: dict[str, Any] = {"model": "tiny", "prompt": "hi"}
BOUND_S = 5.0

BEFORE_FIRST_TOKEN: list[tuple[TandemError, int, str, str | None]] = [
    (Rejected(RejectReason.QUEUE_FULL, "64 wait", retry_after_s=2.2), 429, "queue_full", "3"),
    (Rejected(RejectReason.QUEUE_TIMEOUT, "10 s"), 429, "queue_timeout", "1"),
    (Rejected(RejectReason.TIMEOUT, "30 min"), 503, "timeout", "1"),
    (Rejected(RejectReason.NO_WORKER, "no decode worker", retry_after_s=0.1), 503, "no_worker", "1"),
    (Rejected(RejectReason.DRAINING, "shutting down"), 503, "draining", "1"),
    (WorkerLost("prefill-0", "stream broke"), 503, "worker_lost", "1"),
    (TransferFailed("3 of 9 blocks"), 503, "transfer_failed", "1"),
    (InvariantBroken("block 7 has two owners"), 500, "internal_error", None),
]


async def require_served(client: openai.AsyncOpenAI, dispatcher: ScriptedDispatcher) -> None:
    """The positive control."""
    dispatcher.script = says("ok")
    assert (await client.completions.create(**BODY)).choices[0].text == "ok"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("error", "status", "code", "retry_after"), BEFORE_FIRST_TOKEN)
async def test_a_failure_before_the_first_token_has_its_own_status(
    http: aiohttp.ClientSession,
    client: openai.AsyncOpenAI,
    dispatcher: ScriptedDispatcher,
    error: TandemError,
    status: int,
    code: str,
    retry_after: str | None,
    streamed: bool,
) -> None:
    dispatcher.script = says_then_raises("", error)
    async with http.post("/v1/completions", json={**BODY, "stream": streamed}) as response:
        assert response.status == status
        assert response.headers.get("Retry-After") == retry_after
        assert (await response.json())["error"]["code"] == code
    await require_served(client, dispatcher)


async def test_an_unknown_error_keeps_its_text_to_itself(
    http: aiohttp.ClientSession, dispatcher: ScriptedDispatcher
) -> None:
    dispatcher.script = says_then_raises("", RuntimeError("secret"))
    async with http.post("/v1/completions", json=BODY) as response:
        assert response.status == 500
        assert "secret" not in await response.text()


async def test_a_failure_mid_stream_is_one_frame_and_done(
    http: aiohttp.ClientSession, dispatcher: ScriptedDispatcher, metrics: RouterMetrics
) -> None:
    dispatcher.script = says_then_raises("ab", WorkerLost("decode-0", "stream broke"))
    options = {"stream": True, "stream_options": {"include_usage": True}}
    async with http.post("/v1/completions", json={**BODY, **options}) as response:
        assert response.status == 200
        frames = (await response.text()).split("\n\n")
    assert [json.loads(frame[6:])["choices"][0]["text"] for frame in frames[:2]] == ["a", "b"]
    error = json.loads(frames[2][6:])["error"]
    assert (error["code"], error["type"]) == ("worker_lost", "service_unavailable_error")
    assert frames[3:] == ["data: [DONE]", ""]
    assert metrics.requests.labels("completions", "failed")._value.get() == 1.0


async def test_the_real_client_sees_the_failure_mid_stream(
    client: openai.AsyncOpenAI, dispatcher: ScriptedDispatcher
) -> None:
    dispatcher.script = says_then_raises("ab", WorkerLost("decode-0", "stream broke"))
    stream = await client.completions.create(**BODY, stream=True)
    with pytest.raises(openai.APIError, match="decode-0 lost"):
        async for _ in stream:
            pass
    await require_served(client, dispatcher)


async def test_a_worker_that_can_never_serve_it_names_the_callers_field(
    client: openai.AsyncOpenAI, dispatcher: ScriptedDispatcher
) -> None:
    dispatcher.script = says_then_raises("", BadRequest("prompt", "never fits into a KV pool of 64"))
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT])
async def test_a_worker_that_gives_up_is_an_error(
    client: openai.AsyncOpenAI, dispatcher: ScriptedDispatcher, reason: FinishReason
) -> None:
    dispatcher.script = says("ab", reason)
    with pytest.raises(openai.InternalServerError) as caught:
        await client.completions.create(**BODY)
    assert (caught.value.status_code, caught.value.code) == (500, "generation_failed")
    assert "retry-after" not in caught.value.response.headers  # whoever computes it next would come to the same


async def test_a_grammar_at_a_dead_end_is_the_caller_s_fault(
    client: openai.AsyncOpenAI, dispatcher: ScriptedDispatcher
) -> None:
    """Before any token and, in a stream, after some: under the caller's own field either way."""
    grammar = {"structured_outputs": {"regex": "a+"}}

    async def ends_at_once(request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        yield TokenDelta(request.request_id, 0, (), FinishReason.DEAD_END, message="over")

    dispatcher.script = ends_at_once
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(**BODY, extra_body=grammar)
    assert caught.value.param == "structured_outputs.regex"
    dispatcher.script = says("ab", FinishReason.DEAD_END)
    stream = await client.completions.create(**BODY, stream=True, extra_body=grammar)
    with pytest.raises(openai.APIError) as broken:
        async for _chunk in stream:
            pass
    assert broken.value.param == "structured_outputs.regex"


async def test_a_stream_without_an_end_is_our_fault(client: openai.AsyncOpenAI, dispatcher: ScriptedDispatcher) -> None:
    async def cut_short(request: Any) -> Any:
        async for delta in says("abc")(request):
            if delta.finish_reason is None:
                yield delta

    dispatcher.script = cut_short
    with pytest.raises(openai.InternalServerError) as caught:
        await client.completions.create(**BODY)
    assert caught.value.status_code == 500


@pytest.mark.parametrize(
    ("script", "streamed"),
    [
        pytest.param(says_then_hangs(""), False, id="queued"),
        pytest.param(says_then_hangs(""), True, id="queued-streamed"),
        pytest.param(says_then_hangs("abc"), False, id="half-way"),
        pytest.param(says_then_hangs("abc"), True, id="half-way-streamed"),
        pytest.param(floods(), True, id="slow-reader-streamed"),
    ],
)
async def test_a_client_that_leaves_cancels_its_request(
    http_port: int,
    client: openai.AsyncOpenAI,
    dispatcher: ScriptedDispatcher,
    metrics: RouterMetrics,
    script: Script,
    streamed: bool,
) -> None:
    dispatcher.script = script
    await leave_early(http_port, {**BODY, "stream": streamed}, dispatcher)
    await asyncio.wait_for(dispatcher.closed.wait(), BOUND_S)
    await require_served(client, dispatcher)
    assert metrics.requests.labels("completions", "cancelled")._value.get() == 1.0
    assert metrics.open_requests._value.get() == 0.0


async def leave_early(port: int, body: dict[str, Any], dispatcher: ScriptedDispatcher) -> None:
    """Send a request, wait until it is being served, and hang up without reading a byte."""
    raw = json.dumps(body).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
    writer.write(head.encode() + raw)
    await writer.drain()
    await asyncio.wait_for(dispatcher.started.wait(), BOUND_S)
    assert not dispatcher.closed.is_set()
    writer.close()
