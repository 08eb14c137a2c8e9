"""The gRPC front: by its stubs, and by reflection as a gateway without the schema would."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from front_fakes import (
    END,
    MODEL,
    ScriptedDispatcher,
    floods,
    says,
    says_choices,
    says_scored,
    says_then_hangs,
    says_then_raises,
)
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from tandem.v1 import inference_pb2, inference_pb2_grpc

from core.errors import InvariantBroken, Rejected, RejectReason, TandemError, WorkerLost
from core.request import FinishReason, Placement, SamplingParams, WorkUsage
from router.front.grpc_service import SERVICE_NAME, GrpcFront

BOUND_S = 5.0


def ask(**fields: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(**{"text": "hi", **fields})


async def generate(channel: grpc.aio.Channel, request: inference_pb2.GenerateRequest) -> list[Any]:
    return [item async for item in inference_pb2_grpc.InferenceServiceStub(channel).Generate(request)]


async def require_refused(
    channel: grpc.aio.Channel, request: inference_pb2.GenerateRequest, status: grpc.StatusCode
) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(channel, request)
    assert caught.value.code() is status, caught.value.details()
    return caught.value


async def test_generate(channel: grpc.aio.Channel, dispatcher: ScriptedDispatcher) -> None:
    dispatcher.script = says("one 😀 STOP", matched_stop="STOP", work=[WorkUsage(1, 0, 1, 2, 4096)])
    responses = await generate(
        channel,
        ask(
            request_id="mine",
            model="tiny",
            sampling=inference_pb2.Sampling(temperature=0, top_k=5, seed=9),
            stopping=inference_pb2.Stopping(max_tokens=20, stop=["STOP"], stop_token_ids=[END], ignore_eos=True),
            cache_salt="salt",
            priority=-7,
            prefill_placement=inference_pb2.PREFILL_PLACEMENT_REMOTE,
        ),
    )
    assert "".join(response.text for response in responses) == "one 😀 "
    assert bytes(token_id for response in responses for token_id in response.token_ids) == "one 😀 STOP".encode()
    assert {response.request_id for response in responses} == {"mine"}
    assert [response.finish_reason for response in responses if response.finish_reason] == ["stop"]
    last = responses[-1]
    assert (last.finish_reason, last.matched_stop) == ("stop", "STOP")
    assert last.usage == inference_pb2.Usage(
        prompt_tokens=2, completion_tokens=13, cached_tokens=1, kv_blocks_moved=2, kv_bytes_moved=4096
    )
    request = dispatcher.requests[0]
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.seed) == (0.0, 5, 9)
    assert (request.stop.max_tokens, request.stop.stop_token_ids, request.stop.ignore_eos) == (20, (END,), True)
    assert request.cache_salt == "salt"
    assert request.priority == -7
    assert dispatcher.placements == [Placement.REMOTE]


async def test_penalties_and_logprobs(channel: grpc.aio.Channel, dispatcher: ScriptedDispatcher) -> None:
    dispatcher.script = says_scored("hi")
    asked = inference_pb2.Sampling(
        min_p=0.5,
        repetition_penalty=1.5,
        presence_penalty=-1,
        frequency_penalty=0.25,
        logit_bias={9: -1, 0: 100},
        top_logprobs=1,
    )
    responses = await generate(channel, ask(sampling=asked))
    sampled = dispatcher.requests[0].sampling
    assert (sampled.min_p, sampled.repetition_penalty) == (0.5, 1.5)
    assert (sampled.presence_penalty, sampled.frequency_penalty) == (-1.0, 0.25)
    assert sampled.logit_bias == ((0, 100.0), (9, -1.0))
    scores = [item for response in responses for item in response.logprobs]
    assert [item.drawn for item in scores] == [-0.5, -1.5, -2.5]
    assert all([(top.token_id, top.logprob) for top in item.top] == [(0xF0, -0.25)] for item in scores)
    bare = await generate(channel, ask())
    assert not any(response.logprobs for response in bare)
    neutral = dispatcher.requests[1].sampling
    assert neutral == SamplingParams(seed=neutral.seed)


async def test_several_choices(channel: grpc.aio.Channel, dispatcher: ScriptedDispatcher) -> None:
    dispatcher.script = says_choices(["hello", "", "hi"])
    responses = await generate(channel, ask(n=3))
    texts = ["".join(item.text for item in responses if item.choice == choice) for choice in range(3)]
    assert texts == ["hello", "", "hi"]
    assert [item.choice for item in responses if item.finish_reason == "stop"] == [1, 2, 0]
    assert [item.HasField("usage") for item in responses] == [False] * (len(responses) - 1) + [True]
    assert responses[-1].usage.completion_tokens == 6 + 1 + 3
    assert dispatcher.requests[0].num_choices == 3
    refused = await require_refused(channel, ask(n=17), grpc.StatusCode.INVALID_ARGUMENT)
    assert "n: must be" in (refused.details() or "")
    dispatcher.script = says("one")
    await generate(channel, ask())
    assert dispatcher.requests[-1].num_choices == 1


async def test_every_kind_of_input(channel: grpc.aio.Channel, dispatcher: ScriptedDispatcher) -> None:
    await generate(channel, ask(token_ids=inference_pb2.TokenIds(ids=[104, 105])))
    chat = inference_pb2.ChatMessages(messages=[inference_pb2.ChatMessage(role="developer", content="be")])
    await generate(channel, ask(chat=chat))
    assert [bytes(request.prompt_token_ids) for request in dispatcher.requests] == [b"hi", b"s:be\n"]


async def test_model_info(channel: grpc.aio.Channel) -> None:
    info = await inference_pb2_grpc.InferenceServiceStub(channel).GetModelInfo(inference_pb2.GetModelInfoRequest())
    assert (info.model, info.max_context_tokens, info.vocab_size) == ("tiny", MODEL.max_context_tokens, 257)
    assert list(info.eos_token_ids) == [END]
    assert list(info.adapters) == ["tiny-poet"]


async def test_an_adapter_is_asked_for_by_its_name(channel: grpc.aio.Channel, dispatcher: ScriptedDispatcher) -> None:
    for name in ("", "tiny", "tiny-poet"):
        await generate(channel, ask(text="hi", model=name))
    assert [request.adapter and request.adapter.name for request in dispatcher.requests] == [None, None, "tiny-poet"]


def sampling(**fields: Any) -> dict[str, Any]:
    return {"sampling": inference_pb2.Sampling(**fields)}


def stopping(**fields: Any) -> dict[str, Any]:
    return {"stopping": inference_pb2.Stopping(**fields)}


def chat(*messages: dict[str, str]) -> dict[str, Any]:
    turns = [inference_pb2.ChatMessage(**message) for message in messages]
    return {"chat": inference_pb2.ChatMessages(messages=turns)}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"model": "huge"}, "model"),
    ({"text": ""}, "text"),
    ({"text": "x" * 64}, "text"),
    ({"text": "x" * (2 << 20)}, "text"),
    ({"token_ids": inference_pb2.TokenIds()}, "token_ids.ids"),
    ({"token_ids": inference_pb2.TokenIds(ids=[1, 257])}, "token_ids.ids.1"),
    (chat(), "chat.messages"),
    (chat({"role": "wizard", "content": "hi"}), "chat.messages.0.role"),
    (chat({"role": "assistant", "content": "hi"}), "chat.messages"),
    (sampling(temperature=float("nan")), "sampling.temperature"),
    (sampling(top_p=float("inf")), "sampling.top_p"),
    (sampling(seed=2**63), "sampling.seed"),
    (sampling(min_p=1.5), "sampling.min_p"),
    (sampling(repetition_penalty=0), "sampling.repetition_penalty"),
    (sampling(presence_penalty=float("nan")), "sampling.presence_penalty"),
    (sampling(frequency_penalty=-3), "sampling.frequency_penalty"),
    (sampling(logit_bias={257: 1}), "sampling.logit_bias.257"),
    (sampling(logit_bias={7: float("inf")}), "sampling.logit_bias.7"),
    (sampling(top_logprobs=21), "sampling.top_logprobs"),
    (stopping(max_tokens=63), "stopping.max_tokens"),
    (stopping(max_tokens=0), "stopping.max_tokens"),
    (stopping(min_tokens=63), "stopping.min_tokens"),
    (stopping(stop=[""]), "stopping.stop"),
    (stopping(stop_token_ids=[257]), "stopping.stop_token_ids.0"),
    ({"prefill_placement": 9}, "prefill_placement"),
    ({"request_id": "a b"}, "request_id"),
    ({"request_id": "a" * 129}, "request_id"),
    ({"cache_salt": "x" * 300}, "cache_salt"),
    ({"priority": 101}, "priority"),
]


@pytest.mark.parametrize(("fields", "name"), BAD, ids=[f"{index}-{case[1]}" for index, case in enumerate(BAD)])
async def test_bad_field(
    channel: grpc.aio.Channel, dispatcher: ScriptedDispatcher, fields: dict[str, Any], name: str
) -> None:
    error = await require_refused(channel, ask(**fields), grpc.StatusCode.INVALID_ARGUMENT)
    assert (error.details() or "").startswith(name + ": "), error.details()
    assert dispatcher.requests == [], "a bad request must not reach the dispatcher"
    assert (await generate(channel, ask()))[-1].finish_reason == "stop"


async def test_no_input(channel: grpc.aio.Channel, dispatcher: ScriptedDispatcher) -> None:
    request = inference_pb2.GenerateRequest(model="tiny")
    error = await require_refused(channel, request, grpc.StatusCode.INVALID_ARGUMENT)
    assert (error.details() or "").startswith("input: ")
    assert dispatcher.requests == []


async def test_a_message_that_is_not_protobuf(channel: grpc.aio.Channel, dispatcher: ScriptedDispatcher) -> None:
    """Field 3 is `text`; these bytes are not UTF-8."""
    call = channel.unary_stream(f"/{SERVICE_NAME}/Generate")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [item async for item in call(b"\x1a\x02\xff\xfe")]
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (caught.value.details() or "").startswith("body: ")
    assert dispatcher.requests == []
    assert (await generate(channel, ask()))[-1].finish_reason == "stop"


FAILURES: list[tuple[TandemError, grpc.StatusCode, str | None]] = [
    (Rejected(RejectReason.QUEUE_FULL, "64 wait", 2.5), grpc.StatusCode.RESOURCE_EXHAUSTED, "2500"),
    (Rejected(RejectReason.NO_WORKER, "no decode worker"), grpc.StatusCode.UNAVAILABLE, "1000"),
    (WorkerLost("decode-0", "stream broke"), grpc.StatusCode.UNAVAILABLE, "1000"),
    (InvariantBroken("two owners"), grpc.StatusCode.INTERNAL, None),
]


@pytest.mark.parametrize("text", ["", "ab"])
@pytest.mark.parametrize(("error", "status", "pushback_ms"), FAILURES)
async def test_a_failure_is_a_status(
    channel: grpc.aio.Channel,
    dispatcher: ScriptedDispatcher,
    error: TandemError,
    status: grpc.StatusCode,
    pushback_ms: str | None,
    text: str,
) -> None:
    dispatcher.script = says_then_raises(text, error)
    seen = await require_refused(channel, ask(), status)
    assert dict(seen.trailing_metadata()).get("grpc-retry-pushback-ms") == pushback_ms


async def test_a_worker_that_gives_up_is_no_reason_to_retry(
    channel: grpc.aio.Channel, dispatcher: ScriptedDispatcher
) -> None:
    dispatcher.script = says("ab", FinishReason.ERROR)
    seen = await require_refused(channel, ask(), grpc.StatusCode.INTERNAL)
    assert "grpc-retry-pushback-ms" not in dict(seen.trailing_metadata())


@pytest.mark.parametrize("script", [says_then_hangs(""), floods()], ids=["queued", "flood"])
async def test_a_client_that_leaves_cancels_its_request(
    channel: grpc.aio.Channel, dispatcher: ScriptedDispatcher, script: Any
) -> None:
    dispatcher.script = script
    call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(ask())
    await asyncio.wait_for(dispatcher.started.wait(), BOUND_S)
    assert not dispatcher.closed.is_set()
    call.cancel()
    await asyncio.wait_for(dispatcher.closed.wait(), BOUND_S)


async def test_a_deadline_cancels_the_request(channel: grpc.aio.Channel, dispatcher: ScriptedDispatcher) -> None:
    dispatcher.script = says_then_hangs("a")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [item async for item in inference_pb2_grpc.InferenceServiceStub(channel).Generate(ask(), timeout=0.1)]
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.wait_for(dispatcher.closed.wait(), BOUND_S)


async def test_health(channel: grpc.aio.Channel, grpc_front: tuple[GrpcFront, int], readiness: Any) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING

    async def states() -> list[int]:
        names = ("", "live", "ready", SERVICE_NAME)
        return [(await stub.Check(health_pb2.HealthCheckRequest(service=name))).status for name in names]

    assert await states() == [serving] * 4
    watch = stub.Watch(health_pb2.HealthCheckRequest(service="ready"))
    assert (await watch.read()).status == serving
    readiness.reason = "no ready decode worker"
    await grpc_front[0].health.refresh()
    assert (await watch.read()).status == not_serving
    assert await states() == [serving, serving, not_serving, not_serving]
    readiness.reason = None
    assert await states() == [serving] * 4
    await grpc_front[0].health.enter_graceful_shutdown()
    assert await states() == [not_serving] * 4


async def test_reflection_is_enough_to_call_us(grpc_front: tuple[GrpcFront, int], channel: grpc.aio.Channel) -> None:
    """A client with no schema of ours: it learns the services, builds the messages, and generates."""

    def learn() -> tuple[list[str], Any]:
        with grpc.insecure_channel(f"127.0.0.1:{grpc_front[1]}") as blocking:
            database = ProtoReflectionDescriptorDatabase(blocking)
            return list(database.get_services()), DescriptorPool(database).FindServiceByName(SERVICE_NAME)

    names, service = await asyncio.to_thread(learn)
    assert {SERVICE_NAME, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"} <= set(names)
    method = service.methods_by_name["Generate"]
    request_class, response_class = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
    call = channel.unary_stream(
        f"/{service.full_name}/{method.name}",
        request_serializer=request_class.SerializeToString,
        response_deserializer=response_class.FromString,
    )
    responses: list[Any] = [item async for item in call(request_class(text="hi"))]
    assert "".join(response.text for response in responses) == "ok"


@pytest.mark.parametrize("model", ["x" * 20_000, "é" * 20_000, "😀" * 260, "x" * 1_000_000])
async def test_a_refusal_that_quotes_a_long_field_arrives(channel: grpc.aio.Channel, model: str) -> None:
    """gRPC clients take 8 KiB of trailers, and see another status where there is more."""
    error = await require_refused(channel, ask(model=model), grpc.StatusCode.INVALID_ARGUMENT)
    details = error.details()
    assert details is not None and details.startswith(f"model: '{model[:100]}") and details.endswith(" ...")
    trailers = error.trailing_metadata()
    assert trailers is not None and sum(len(key) + len(value) for key, value in trailers) < 3000
