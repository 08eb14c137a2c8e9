"""Keys, tenants and patience over both fronts; and what a policy leaves of a request."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import aiohttp
import grpc
import pytest
from front_fakes import ScriptedDispatcher, says_then_raises
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from tandem.v1 import inference_pb2, inference_pb2_grpc

from core.errors import Rejected, RejectReason
from core.request import GenerateRequest, SamplingParams, StopConditions
from router.admission.policy import AdmissionPolicy, DegradePolicy, TenantPolicy
from router.front.caller import degraded
from router.front.errors import REASON_HEADER, edge_error
from router.front.generation import Front
from telemetry.router_metrics import RouterMetrics

KEY = "sk-acme-1"
ACME = TenantPolicy(keys_sha256=[hashlib.sha256(KEY.encode()).hexdigest()])
BODY: dict[str, Any] = {"model": "tiny", "prompt": "hi"}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_a_key_says_the_tenant_and_a_wrong_one_touches_nothing(
    http: aiohttp.ClientSession, front: Front, dispatcher: ScriptedDispatcher, metrics: RouterMetrics
) -> None:
    front.apply(AdmissionPolicy(tenants={"acme": ACME}))
    for headers in ({}, bearer("sk-other"), {"Authorization": KEY}, {"Authorization": f"Basic {KEY}"}):
        async with http.post("/v1/completions", json=BODY, headers=headers) as response:
            assert response.status == 401
            assert response.headers["WWW-Authenticate"] == "Bearer"
            assert (await response.json())["error"]["code"] == "invalid_api_key"
        async with http.get("/v1/models", headers=headers) as response:
            assert response.status == 401
    assert dispatcher.requests == []
    assert metrics.requests.labels("completions", "unauthenticated")._value.get() == 4.0
    async with http.post("/v1/completions", json=BODY, headers=bearer(KEY)) as response:
        assert response.status == 200
    async with http.get("/health") as response:
        assert response.status == 200
    assert [request.tenant for request in dispatcher.requests] == ["acme"]


@pytest.mark.parametrize(
    ("anonymous", "headers", "status"),
    [(None, {}, 401), (TenantPolicy(), {}, 200), (TenantPolicy(), bearer("unused"), 401)],
)
async def test_who_sends_no_key_is_served_where_that_is_said(
    http: aiohttp.ClientSession, front: Front, anonymous: TenantPolicy | None, headers: dict[str, str], status: int
) -> None:
    front.apply(AdmissionPolicy(tenants={"acme": ACME}, anonymous=anonymous))
    async with http.post("/v1/completions", json=BODY, headers=headers) as response:
        assert response.status == status


async def test_without_any_keys_none_is_looked_at(http: aiohttp.ClientSession, dispatcher: ScriptedDispatcher) -> None:
    async with http.post("/v1/completions", json=BODY, headers=bearer("unused")) as response:
        assert response.status == 200
    assert [request.tenant for request in dispatcher.requests] == [""]


async def test_grpc_reads_the_key_from_its_metadata(
    channel: grpc.aio.Channel, front: Front, dispatcher: ScriptedDispatcher
) -> None:
    front.apply(AdmissionPolicy(tenants={"acme": ACME}))
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    for metadata in ((), (("authorization", "Bearer wrong"),)):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(inference_pb2.GenerateRequest(text="hi"), metadata=metadata).read()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.GetModelInfo(inference_pb2.GetModelInfoRequest(), metadata=metadata)
    assert dispatcher.requests == []
    good = (("authorization", f"Bearer {KEY}"), ("x-slo-ttft-ms", "1500"))
    await stub.Generate(inference_pb2.GenerateRequest(text="hi"), metadata=good).read()
    assert [request.tenant for request in dispatcher.requests] == ["acme"]
    assert dispatcher.max_ttfts_s == [1.5]


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan", "inf", "1e30", "1_000", "\u0661", "", "1" * 400])
async def test_patience_that_is_no_time_is_refused_by_its_header(http: aiohttp.ClientSession, value: str) -> None:
    async with http.post("/v1/completions", json=BODY, headers={"x-slo-ttft-ms": value}) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "x-slo-ttft-ms"


@pytest.mark.parametrize("name", ["Authorization", "x-slo-ttft-ms", "X-Session-Id"])
@pytest.mark.parametrize("second", ["same", "other"])
async def test_a_header_that_is_sent_twice_is_refused_by_its_name(
    http: aiohttp.ClientSession, front: Front, dispatcher: ScriptedDispatcher, name: str, second: str
) -> None:
    front.apply(AdmissionPolicy(tenants={"acme": ACME}))
    good = {"Authorization": f"Bearer {KEY}", "x-slo-ttft-ms": "100", "X-Session-Id": "s"}
    value = good[name] if second == "same" else "Bearer 1"
    async with http.post("/v1/completions", json=BODY, headers=[*good.items(), (name, value)]) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"].lower() == name.lower()
    assert dispatcher.requests == []
    async with http.post("/v1/completions", json=BODY, headers=good) as response:
        assert response.status == 200


@pytest.mark.parametrize("name", ["authorization", "x-slo-ttft-ms"])
async def test_metadata_that_is_sent_twice_is_refused_by_its_name(
    channel: grpc.aio.Channel, front: Front, dispatcher: ScriptedDispatcher, name: str
) -> None:
    front.apply(AdmissionPolicy(tenants={"acme": ACME}))
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    good = (("authorization", f"Bearer {KEY}"), ("x-slo-ttft-ms", "100"))
    for call in (stub.Generate, stub.GetModelInfo):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            asked = call(_question(call, stub), metadata=(*good, (name, "1")))
            await (asked.read() if call is stub.Generate else asked)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (caught.value.details() or "").startswith(f"{name}: ")
    assert dispatcher.requests == []


def _question(call: object, stub: Any) -> Any:
    return inference_pb2.GenerateRequest(text="hi") if call is stub.Generate else inference_pb2.GetModelInfoRequest()


@pytest.mark.parametrize(
    "key",
    [b"\xff\xfe", "\N{KEY}".encode(), b"sk-acme-1\xc3", b"a" * 7000, b""],
    ids=["bytes", "utf8", "cut", "long", "empty"],
)
async def test_a_key_of_any_bytes_is_no_fault_of_ours(http_port: int, front: Front, key: bytes) -> None:
    """Sent raw: clients' libraries would not send them."""
    known = AdmissionPolicy(tenants={"acme": TenantPolicy(keys_sha256=[hashlib.sha256(key).hexdigest()])})
    for policy, status in ((AdmissionPolicy(tenants={"acme": ACME}), b"401"), (known, b"200")):
        front.apply(policy)
        reader, writer = await asyncio.open_connection("127.0.0.1", http_port)
        head = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer "
        writer.write(head + key + b"\r\n\r\n")
        answer = await reader.read()
        writer.close()
        assert answer.split(b" ")[1] == status


async def test_patience_reaches_the_dispatcher(http: aiohttp.ClientSession, dispatcher: ScriptedDispatcher) -> None:
    async with http.post("/v1/completions", json=BODY, headers={"x-slo-ttft-ms": "250"}) as response:
        assert response.status == 200
    async with http.post("/v1/completions", json=BODY) as response:
        assert response.status == 200
    assert dispatcher.max_ttfts_s == [0.25, None]


@pytest.mark.parametrize("reason", RejectReason)
async def test_a_reason_is_the_same_everywhere(
    http: aiohttp.ClientSession,
    channel: grpc.aio.Channel,
    dispatcher: ScriptedDispatcher,
    metrics: RouterMetrics,
    reason: RejectReason,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    dispatcher.script = says_then_raises("", Rejected(reason, "why", retry_after_s=2.5))
    async with http.post("/v1/completions", json=BODY) as response:
        assert response.status in (429, 503)
        assert response.headers[REASON_HEADER] == reason
        assert response.headers["Retry-After"] == "3"
        assert (await response.json())["error"]["code"] == reason
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        await stub.Generate(inference_pb2.GenerateRequest(text="hi")).read()
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    status = rpc_status.from_call(_Call(caught.value))
    assert status.details[0].Unpack(info) and status.details[1].Unpack(retry)
    assert (info.reason, info.domain) == (reason, "tandem")
    assert retry.retry_delay.ToMilliseconds() == 2500
    assert metrics.rejected.labels(reason)._value.get() == 2.0
    assert sum(f"reason={reason}" in record.getMessage() for record in caplog.records) == 2


class _Call:
    """What grpc_status wants of a call, from an asyncio call's error."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self._error = error

    def code(self) -> grpc.StatusCode:
        return self._error.code()

    def details(self) -> str | None:
        return self._error.details()

    def trailing_metadata(self) -> tuple[Any, ...]:
        return tuple(self._error.trailing_metadata())


def request(max_tokens: int, min_tokens: int = 0, priority: int = 0, tenant: str = "") -> GenerateRequest:
    stop = StopConditions(max_tokens, min_tokens)
    return GenerateRequest("r", (1, 2), SamplingParams(), stop, priority=priority, tenant=tenant)


def test_degradation_cuts_outputs_and_makes_batch_work() -> None:
    policy = AdmissionPolicy(
        tenants={"t": TenantPolicy(max_output_tokens=5, batch=True)}, degrade=DegradePolicy(max_output_tokens=10)
    )
    assert degraded(request(100, min_tokens=20), policy) == request(10, min_tokens=10)
    assert degraded(request(7), policy) == request(7)
    assert degraded(request(100, tenant="t"), policy) == request(5, priority=1, tenant="t")
    everything = AdmissionPolicy(degrade=DegradePolicy(everything_batch=True))
    assert degraded(request(7, priority=-3), everything) == request(7, priority=1)
    assert degraded(request(7, priority=4), everything) == request(7, priority=4)
    assert degraded(request(7), AdmissionPolicy()) == request(7)


def test_an_error_that_no_retry_helps_says_no_time() -> None:
    assert "Retry-After" in edge_error(Rejected(RejectReason.SHED, "why")).http_headers
    assert "Retry-After" not in edge_error(RuntimeError()).http_headers
