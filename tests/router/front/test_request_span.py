"""The outermost span of a trace: where it hangs, what it says, and that it goes on to the dispatcher."""

from __future__ import annotations

from typing import Any, Final

import aiohttp
import grpc
import pytest
from front_fakes import MODEL, ScriptedDispatcher, says_then_raises
from tandem.v1 import inference_pb2, inference_pb2_grpc

from core.errors import Rejected, RejectReason
from router.front.generation import Front
from telemetry.tracing import Tracer
from tests.telemetry.spans import KeptSpans

CALLER: Final = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
BODY: Final[dict[str, Any]] = {"model": MODEL.name, "prompt": "secret", "temperature": 0}


@pytest.fixture
def kept() -> KeptSpans:
    return KeptSpans()


@pytest.fixture
def tracer(kept: KeptSpans, front: Front) -> Tracer:
    """Of requests whose callers say so."""
    front._tracer = kept.tracer(ratio=0.0)
    return front._tracer


async def test_http(
    http: aiohttp.ClientSession,
    dispatcher: ScriptedDispatcher,
    kept: KeptSpans,
    tracer: Tracer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    async with http.post("/v1/completions", json=BODY, headers={"traceparent": CALLER}) as response:
        assert response.status == 200
    tracer.close(30.0)
    (span,) = kept.spans
    assert span.name == "text_completion tiny" and span.status.is_ok
    assert span.parent is not None and f"{span.parent.span_id:016x}" == CALLER.split("-")[2]
    attributes = dict(span.attributes or {})
    assert attributes["gen_ai.usage.input_tokens"] == 6
    assert attributes["gen_ai.usage.output_tokens"] == 3
    assert attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert attributes["tandem.outcome"] == "ok"
    assert not any("secret" in str(value) for value in attributes.values())
    # Below it goes what the dispatcher and the workers do; the log line names the trace.
    trace_id, span_id = (f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}")
    assert dispatcher.requests[0].traceparent == f"00-{trace_id}-{span_id}-01"
    assert trace_id == CALLER.split("-")[1] and f"trace_id={trace_id}" in caplog.text


async def test_grpc(channel: grpc.aio.Channel, dispatcher: ScriptedDispatcher, kept: KeptSpans, tracer: Tracer) -> None:
    dispatcher.script = says_then_raises("a", Rejected(RejectReason.TIMEOUT, "too long"))
    call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(
        inference_pb2.GenerateRequest(text="hi"), metadata=(("traceparent", CALLER),)
    )
    with pytest.raises(grpc.aio.AioRpcError):
        [_ async for _ in call]
    tracer.close(30.0)
    (span,) = kept.spans
    assert f"{span.context.trace_id:032x}" == CALLER.split("-")[1]
    assert not span.status.is_ok
    assert dict(span.attributes or {})["error.type"] == "timeout"


@pytest.mark.parametrize("sent", [[], [CALLER, CALLER], ["00-nonsense"], [CALLER[:-2] + "00"]])
async def test_a_caller_that_does_not_say_so_is_not_traced(
    http: aiohttp.ClientSession, dispatcher: ScriptedDispatcher, kept: KeptSpans, tracer: Tracer, sent: list[str]
) -> None:
    headers = [("traceparent", value) for value in sent]
    async with http.post("/v1/completions", json=BODY, headers=headers) as response:
        assert response.status == 200
    tracer.close(30.0)
    assert kept.spans == [] and dispatcher.requests[0].traceparent == ""
