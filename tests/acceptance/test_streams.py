"""Many streams at once, clients that leave in every state, and the real clients of both fronts."""

from __future__ import annotations

import asyncio
import json
import time

import aiohttp
import grpc
import openai
import pytest
from google.protobuf import descriptor_pool, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.acceptance.golden import CASES
from tests.acceptance.running_cluster import RunningCluster, wait_until

PROSE = next(case for case in CASES if case.name == "prose_1500")


async def stream_ids(session: aiohttp.ClientSession, cluster: RunningCluster, prompt, **fields) -> list[int]:
    """The token ids of one streamed completion."""
    body = {"model": cluster.model, "prompt": list(prompt), "stream": True, "temperature": 0, "return_token_ids": True}
    ids: list[int] = []
    async with session.post(f"{cluster.http}/v1/completions", json={**body, **fields}) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                ids += chunk["choices"][0].get("token_ids", [])
    return ids


async def test_64_concurrent_streams_finish_and_leave_nothing(pair: RunningCluster) -> None:
    cases = [case for case in CASES if len(case.prompt_ids) <= 64]
    timeout = aiohttp.ClientTimeout(total=280)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        jobs = [
            stream_ids(session, pair, cases[number % len(cases)].prompt_ids, max_tokens=32, cache_salt=f"s{number}")
            for number in range(64)
        ]
        outputs = await asyncio.gather(*jobs)
    for number, ids in enumerate(outputs):
        assert tuple(ids) == cases[number % len(cases)].output_ids[:32]
    await asyncio.to_thread(pair.wait_idle)


@pytest.mark.parametrize("state", ["queued", "prefilling", "moving", "decoding"])
@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_leaves_in_any_state_leaves_nothing(
    pair: RunningCluster, state: str, streamed: bool
) -> None:
    """All choices of it; prefilled remotely, whatever the router has learned of the workers' paces by now."""
    fields = {"tandem": {"prefill": "remote"}}
    async with aiohttp.ClientSession() as session:
        ahead = []
        if state == "queued":  # behind what keeps the prefill worker busy for seconds
            salts = (f"busy-{streamed}-0", f"busy-{streamed}-1")
            asked = [stream_ids(session, pair, PROSE.prompt_ids, cache_salt=salt, **fields) for salt in salts]
            ahead = [asyncio.create_task(stream) for stream in asked]
            await asyncio.to_thread(wait_until, lambda: pair.workers()["prefill-0"].load.waiting_tokens > 1000, 30.0)
        fields |= {"max_tokens": 400, "ignore_eos": True, "cache_salt": f"leaves-{state}-{streamed}"}
        fields |= {"stream": True, "n": 3} if streamed else {"stream": False}
        leaving = asyncio.create_task(stream_ids(session, pair, PROSE.prompt_ids[:700], **fields))
        await asyncio.to_thread(wait_until, lambda: reached(pair, state), 60.0, lambda: describe(pair))
        leaving.cancel()
        left_s = time.monotonic()
        await asyncio.gather(leaving, return_exceptions=True)
        for stream in ahead:
            stream.cancel()
        await asyncio.gather(*ahead, return_exceptions=True)
    await asyncio.to_thread(pair.wait_idle)
    assert time.monotonic() - left_s < 60


def reached(cluster: RunningCluster, state: str) -> bool:
    """As seen from the workers' loads: the only request, or the only one besides the busy ones."""
    workers = cluster.workers()
    prefill, decode = workers["prefill-0"].load, workers["decode-0"].load
    match state:
        case "queued":
            return cluster.status().open_requests >= 3
        case "prefilling":  # blocks are locked on decode, the prompt is being computed
            return prefill.running_requests > 0 and decode.used_blocks > 0
        case "moving":  # part of the prompt is computed, so part of its blocks is being pushed
            return 0 < prefill.waiting_tokens < 500 and decode.used_blocks > 0
        case _:
            return decode.running_requests > 0


def describe(cluster: RunningCluster) -> str:
    return str({name: item.load for name, item in cluster.workers().items()})


async def test_the_openai_client_works_unchanged(pair: RunningCluster) -> None:
    (case,) = [case for case in CASES if case.name == "chat_capital"]
    async with openai.AsyncOpenAI(base_url=f"{pair.http}/v1", api_key="unused") as client:
        models = (await client.models.list()).data
        assert [model.id for model in models if not (model.model_extra or {}).get("parent")] == [pair.model]
        whole = await client.chat.completions.create(model=pair.model, messages=list(case.messages), temperature=0)
        assert whole.choices[0].message.content == case.output_text
        assert whole.choices[0].finish_reason == "stop"
        assert whole.usage is not None and whole.usage.completion_tokens == len(case.output_ids)
        stream = await client.chat.completions.create(
            model=pair.model, messages=list(case.messages), temperature=0, stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        pieces, usage = [], None
        async for chunk in stream:
            pieces += [choice.delta.content or "" for choice in chunk.choices]
            usage = chunk.usage or usage
        assert "".join(pieces) == case.output_text
        assert usage is not None and usage.prompt_tokens == len(case.prompt_ids)
        text = await client.completions.create(model=pair.model, prompt="The capital of France is", max_tokens=5,
                                               temperature=0)  # fmt: skip
        assert text.choices[0].text.startswith(" Paris")


def test_a_reflection_driven_grpc_call_generates(pair: RunningCluster) -> None:
    with grpc.insecure_channel(pair.grpc, options=(("grpc.enable_http_proxy", 0),)) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert "tandem.v1.InferenceService" in database.get_services()
        pool = descriptor_pool.DescriptorPool(database)
        method = pool.FindServiceByName("tandem.v1.InferenceService").methods_by_name["Generate"]
        request_class = message_factory.GetMessageClass(method.input_type)
        response_class = message_factory.GetMessageClass(method.output_type)
        call = channel.unary_stream(
            "/tandem.v1.InferenceService/Generate", request_class.SerializeToString, response_class.FromString
        )
        request = request_class(text="The capital of France is")
        request.sampling.temperature = 0
        request.stopping.max_tokens = 8
        answers = list(call(request, timeout=60))
    assert "".join(answer.text for answer in answers).startswith(" Paris")
    assert answers[-1].finish_reason == "length"
    assert answers[-1].usage.prompt_tokens == 5
