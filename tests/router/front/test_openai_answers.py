"""What a good request gets, seen by the real client and byte by byte."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import openai
import pytest
from front_fakes import END, MODEL, ScriptedDispatcher, says, says_choices, says_scored

from core.identity import Adapter
from core.request import FinishReason, Placement, SamplingParams, WorkUsage
from telemetry.router_metrics import RouterMetrics

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}

CHAT_TRANSCRIPT = (
    'data: {"object":"chat.completion.chunk","id":"chatcmpl-r1","created":1700000123,"model":"tiny",'
    '"system_fingerprint":"fp_0123456789","choices":[{"index":0,"delta":{"role":"assistant","content":""},'
    '"logprobs":null,"finish_reason":null}],"usage":null}\n\n'
    'data: {"object":"chat.completion.chunk","id":"chatcmpl-r1","created":1700000123,"model":"tiny",'
    '"system_fingerprint":"fp_0123456789","choices":[{"index":0,"delta":{"content":"o"},'
    '"logprobs":null,"finish_reason":null}],"usage":null}\n\n'
    'data: {"object":"chat.completion.chunk","id":"chatcmpl-r1","created":1700000123,"model":"tiny",'
    '"system_fingerprint":"fp_0123456789","choices":[{"index":0,"delta":{"content":"k"},'
    '"logprobs":null,"finish_reason":null}],"usage":null}\n\n'
    'data: {"object":"chat.completion.chunk","id":"chatcmpl-r1","created":1700000123,"model":"tiny",'
    '"system_fingerprint":"fp_0123456789","choices":[{"index":0,"delta":{},'
    '"logprobs":null,"finish_reason":"stop"}],"usage":null}\n\n'
    'data: {"object":"chat.completion.chunk","id":"chatcmpl-r1","created":1700000123,"model":"tiny",'
    '"system_fingerprint":"fp_0123456789","choices":[],"usage":{"prompt_tokens":5,"completion_tokens":3,'
    '"total_tokens":8,"prompt_tokens_details":{"cached_tokens":0},"tandem":{"computed_tokens":0,'
    '"fetched_tokens":0,"kv_blocks_moved":0,"kv_bytes_moved":0}}}\n\n'
    "data: [DONE]\n\n"
)
COMPLETION_TRANSCRIPT = (
    'data: {"object":"text_completion","id":"cmpl-r1","created":1700000123,"model":"tiny",'
    '"system_fingerprint":"fp_0123456789","choices":[{"text":"o","index":0,"logprobs":null,'
    '"finish_reason":null}]}\n\n'
    'data: {"object":"text_completion","id":"cmpl-r1","created":1700000123,"model":"tiny",'
    '"system_fingerprint":"fp_0123456789","choices":[{"text":"k","index":0,"logprobs":null,'
    '"finish_reason":null}]}\n\n'
    'data: {"object":"text_completion","id":"cmpl-r1","created":1700000123,"model":"tiny",'
    '"system_fingerprint":"fp_0123456789","choices":[{"text":"","index":0,"logprobs":null,'
    '"finish_reason":"stop"}]}\n\n'
    "data: [DONE]\n\n"
)


async def test_chat_in_one_piece(client: openai.AsyncOpenAI, dispatcher: ScriptedDispatcher) -> None:
    dispatcher.script = says("hello", work=[WorkUsage(2, 0, 9, 0, 0), WorkUsage(0, 0, 0, 3, 4096)])
    answer = await client.chat.completions.create(
        model="tiny", messages=[{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}], seed=7
    )
    assert answer.id == "chatcmpl-r1"
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.content == "hello"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (10, 6, 16)
    assert answer.usage.prompt_tokens_details.cached_tokens == 1, "10 prompt tokens, 9 computed: one was saved"
    assert answer.usage.model_extra == {
        "tandem": {"computed_tokens": 9, "fetched_tokens": 0, "kv_blocks_moved": 3, "kv_bytes_moved": 4096}
    }
    request = dispatcher.requests[0]
    assert bytes(request.prompt_token_ids) == b"s:be\nu:hi\n"
    assert request.sampling.seed == 7
    assert request.stop.max_tokens == MODEL.max_context_tokens - 10, "the rest of the context"
    assert dispatcher.closed.is_set()


async def test_chat_streamed(client: openai.AsyncOpenAI, dispatcher: ScriptedDispatcher) -> None:
    dispatcher.script = says("hello")
    stream = await client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}], stream=True
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hello"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 6 + ["stop"]
    assert all(chunk.usage is None for chunk in chunks)
    assert {chunk.id for chunk in chunks} == {"chatcmpl-r1"}


@pytest.mark.parametrize("prompt", ["hi", ["hi"], [104, 105], [[104, 105]]])
async def test_completion_in_one_piece(client: openai.AsyncOpenAI, dispatcher: ScriptedDispatcher, prompt: Any) -> None:
    dispatcher.script = says("abc", FinishReason.LENGTH)
    answer = await client.completions.create(model="tiny", prompt=prompt, max_tokens=3)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("abc", "length")
    assert bytes(dispatcher.requests[0].prompt_token_ids) == b"hi"
    assert dispatcher.requests[0].stop.max_tokens == 3


async def test_completion_streamed(client: openai.AsyncOpenAI, dispatcher: ScriptedDispatcher) -> None:
    dispatcher.script = says("abc", FinishReason.LENGTH)
    stream = await client.completions.create(model="tiny", prompt="hi", max_tokens=3, stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abc"
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_an_answer_can_be_sent_back_as_it_came(client: openai.AsyncOpenAI) -> None:
    first = await client.chat.completions.create(**CHAT)
    second = await client.chat.completions.create(
        model="tiny", messages=[*CHAT["messages"], first.choices[0].message, {"role": "user", "content": "more"}]
    )
    assert second.choices[0].message.content == "ok"


async def test_chat_stream_byte_for_byte(http: aiohttp.ClientSession) -> None:
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    async with http.post("/v1/chat/completions", json=body) as response:
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/event-stream")
        assert response.headers["x-request-id"] == "r1"
        assert (await response.text()) == CHAT_TRANSCRIPT


async def test_completion_stream_byte_for_byte(http: aiohttp.ClientSession) -> None:
    async with http.post("/v1/completions", json={"model": "tiny", "prompt": "hi", "stream": True}) as response:
        assert (await response.text()) == COMPLETION_TRANSCRIPT


async def test_usage_in_each_chunk_when_asked(client: openai.AsyncOpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = await client.completions.create(model="tiny", prompt="hi", stream=True, stream_options=options)
    chunks = [chunk async for chunk in stream]
    assert [chunk.usage.completion_tokens if chunk.usage else None for chunk in chunks] == [1, 2, 3, 3]
    assert [len(chunk.choices) for chunk in chunks] == [1, 1, 1, 0]


@pytest.mark.parametrize("text", ["data: [DONE]\n\ndata: [DONE]\n\n", "a\u2028b\x85c\r\n", "😀 naïve 日本"])
async def test_text_that_could_break_the_stream(
    client: openai.AsyncOpenAI, dispatcher: ScriptedDispatcher, text: str
) -> None:
    """Every byte is a token here, so an emoji comes in four."""
    dispatcher.script = says(text)
    stream = await client.completions.create(model="tiny", prompt="hi", stream=True)
    pieces = [chunk.choices[0].text async for chunk in stream]
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)


async def test_an_incomplete_character_at_the_end_is_not_lost(
    client: openai.AsyncOpenAI, dispatcher: ScriptedDispatcher
) -> None:
    dispatcher.script = says("a😀".encode()[:-1], FinishReason.LENGTH)
    answer = await client.completions.create(model="tiny", prompt="hi")
    assert answer.choices[0].text == "a\ufffd"


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_stop_string_split_over_tokens(
    client: openai.AsyncOpenAI, dispatcher: ScriptedDispatcher, streamed: bool
) -> None:
    dispatcher.script = says("one STO, two STOP", matched_stop="STOP")
    if streamed:
        stream = await client.completions.create(model="tiny", prompt="hi", stop="STOP", stream=True)
        chunks = [chunk async for chunk in stream]
        text, reason = "".join(chunk.choices[0].text for chunk in chunks), chunks[-1].choices[0].finish_reason
        assert [chunk.choices[0].text for chunk in chunks if "S" in chunk.choices[0].text] == ["STO,"], "held back"
    else:
        answer = await client.completions.create(model="tiny", prompt="hi", stop=["STOP", "never"])
        text, reason = answer.choices[0].text, answer.choices[0].finish_reason
    assert (text, reason) == ("one STO, two ", "stop")


async def test_held_back_text_comes_out_when_no_stop_string_follows(
    client: openai.AsyncOpenAI, dispatcher: ScriptedDispatcher
) -> None:
    dispatcher.script = says("one STO", FinishReason.LENGTH)
    answer = await client.completions.create(model="tiny", prompt="hi", stop="STOP")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("one STO", "length")


async def test_every_option_reaches_the_request(client: openai.AsyncOpenAI, dispatcher: ScriptedDispatcher) -> None:
    await client.chat.completions.create(
        **CHAT,
        temperature=0.5,
        top_p=0.9,
        seed=3,
        stop=["x", "y"],
        max_completion_tokens=9,
        n=1,
        user="someone",
        metadata={"a": "b"},
        store=False,
        presence_penalty=-2,
        frequency_penalty=0.5,
        logit_bias={"256": -100, "0": 0.25},  # type: ignore[dict-item]
        logprobs=True,
        top_logprobs=4,
        tools=[],
        parallel_tool_calls=True,
        response_format={"type": "text"},
        extra_body={
            "top_k": 1000,
            "min_p": 0.05,
            "repetition_penalty": 1.25,
            "min_tokens": 2,
            "stop_token_ids": [END],
            "ignore_eos": True,
            "cache_salt": "salt",
            "priority": 5,
            "tandem": {"prefill": "remote"},
        },
    )
    request = dispatcher.requests[0]
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.seed) == (0.5, 0.9, 3)
    assert request.sampling.top_k == MODEL.vocab_size, "a larger limit limits nothing"
    assert (request.sampling.min_p, request.sampling.repetition_penalty) == (0.05, 1.25)
    assert (request.sampling.presence_penalty, request.sampling.frequency_penalty) == (-2.0, 0.5)
    assert (request.sampling.logit_bias, request.sampling.top_logprobs) == (((0, 0.25), (256, -100.0)), 4)
    assert (request.stop.max_tokens, request.stop.min_tokens, request.stop.ignore_eos) == (9, 2, True)
    assert (request.stop.stop_strings, request.stop.stop_token_ids) == (("x", "y"), (END,))
    assert request.cache_salt == "salt"
    assert request.priority == 5
    assert dispatcher.placements == [Placement.REMOTE]


async def test_top_k_of_minus_one_is_no_limit(client: openai.AsyncOpenAI, dispatcher: ScriptedDispatcher) -> None:
    await client.chat.completions.create(**CHAT, extra_body={"top_k": -1})
    assert dispatcher.requests[0].sampling.top_k == 0


async def test_null_is_not_given(http: aiohttp.ClientSession, dispatcher: ScriptedDispatcher) -> None:
    names = ["max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stream", "stream_options", "n", "tandem"]
    names += ["min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"]
    names += ["logprobs", "top_logprobs", "priority"]
    async with http.post("/v1/chat/completions", json={**CHAT, **dict.fromkeys(names)}) as response:
        assert response.status == 200
    sampling = dispatcher.requests[0].sampling
    assert sampling == SamplingParams(seed=sampling.seed)


@pytest.mark.parametrize("all_at_once", [False, True])
async def test_several_choices_in_one_piece(
    client: openai.AsyncOpenAI, dispatcher: ScriptedDispatcher, all_at_once: bool
) -> None:
    dispatcher.script = says_choices(
        ["hello", "", "hi STO"], work=WorkUsage(computed_tokens=5), all_at_once=all_at_once
    )
    answer = await client.chat.completions.create(**CHAT, n=3, stop=["STOP"], extra_body={"return_token_ids": True})
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answer.choices] == ["hello", "", "hi STO"]
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 3
    tokens = [(choice.model_extra or {})["token_ids"] for choice in answer.choices]
    assert tokens == [[*text.encode(), END] for text in ("hello", "", "hi STO")]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 6 + 1 + 7)
    assert dispatcher.requests[0].num_choices == 3


@pytest.mark.parametrize("all_at_once", [False, True])
async def test_several_choices_streamed(
    client: openai.AsyncOpenAI, dispatcher: ScriptedDispatcher, all_at_once: bool
) -> None:
    dispatcher.script = says_choices(["one STOP", "two"], all_at_once=all_at_once)
    options: Any = {"include_usage": True}
    stream = await client.chat.completions.create(**CHAT, n=2, stop="STOP", stream=True, stream_options=options)
    chunks = [chunk async for chunk in stream]
    assert [chunk.choices[0].delta.role for chunk in chunks[:2]] == ["assistant"] * 2
    assert [chunk.choices[0].index for chunk in chunks[:2]] == [0, 1]
    text, finishes = ["", ""], [[], []]  # type: ignore[var-annotated]
    for chunk in chunks[:-1]:
        [choice] = chunk.choices
        assert not finishes[choice.index], "nothing follows a finish"
        text[choice.index] += choice.delta.content or ""
        finishes[choice.index] += [choice.finish_reason] if choice.finish_reason else []
    assert (text, finishes) == (["one ", "two"], [["stop"], ["stop"]])
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == (9 if all_at_once else 8) + 4  # what a choice ends with is all counted


async def test_logprobs_of_several_choices(client: openai.AsyncOpenAI, dispatcher: ScriptedDispatcher) -> None:
    dispatcher.script = says_choices(["ab", "c"], scores=[-0.5, -2.0])
    for streamed in (False, True):
        asked: Any = {"model": "tiny", "prompt": "hi", "logprobs": 0, "n": 2, "stream": streamed}
        answer = await client.completions.create(**asked)
        choices = [chunk.choices[0] async for chunk in answer] if streamed else answer.choices
        found: dict[int, list[Any]] = {0: [], 1: []}
        for choice in choices:
            if choice.logprobs:
                columns = choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.text_offset
                found[choice.index] += zip(*columns, strict=True)
        assert found == {
            0: [("a", -0.5, 0), ("b", -0.5, 1), ("<end>", -0.5, 2)],
            1: [("c", -2.0, 0), ("<end>", -2.0, 1)],
        }


@pytest.mark.parametrize("logprobs", [None, 0])
async def test_best_of_returns_the_most_probable(
    client: openai.AsyncOpenAI, dispatcher: ScriptedDispatcher, logprobs: int | None
) -> None:
    """By the mean of a token, not the sum, which would take the shortest."""
    dispatcher.script = says_choices(["short", "long and good", "equal", "bad"], scores=[-0.5, -0.25, -0.5, -3.0])
    answer = await client.completions.create(model="tiny", prompt="hi", n=2, best_of=4, logprobs=logprobs)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "long and good"), (1, "short")]
    for choice, score in zip(answer.choices, (-0.25, -0.5), strict=True):
        scores = choice.logprobs.token_logprobs if choice.logprobs else None
        assert scores == (None if logprobs is None else [score] * (len(choice.text) + 1))
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(len(text) + 1 for text in ("short", "long and good", "equal", "bad"))
    assert dispatcher.requests[0].num_choices == 4


async def test_as_many_as_generated_come_in_their_own_order(
    client: openai.AsyncOpenAI, dispatcher: ScriptedDispatcher
) -> None:
    dispatcher.script = says_choices(["a", "b"], scores=[-3.0, -1.0])
    answer = await client.completions.create(model="tiny", prompt="hi", n=2, best_of=2)
    assert [choice.text for choice in answer.choices] == ["a", "b"]
    assert dispatcher.requests[0].sampling.top_logprobs is None, "nothing to rank"


@pytest.mark.parametrize("streamed", [False, True])
async def test_chat_logprobs(client: openai.AsyncOpenAI, dispatcher: ScriptedDispatcher, streamed: bool) -> None:
    dispatcher.script = says_scored("hé")
    asked: Any = {**CHAT, "logprobs": True, "top_logprobs": 2, "stream": streamed}
    answer = await client.chat.completions.create(**asked)
    choices = [chunk.choices[0] async for chunk in answer] if streamed else [answer.choices[0]]
    content = [item for choice in choices if choice.logprobs for item in choice.logprobs.content or []]
    assert [(item.token, item.bytes, item.logprob) for item in content] == [
        ("h", [0x68], -0.5),
        ("\\xc3", [0xC3], -1.5),
        ("\\xa9", [0xA9], -2.5),
        ("<end>", list(b"<end>"), -3.5),
    ]
    for item in content:
        tops = [(top.token, top.bytes, top.logprob) for top in item.top_logprobs]
        assert tops == [("\\xf0", [0xF0], -0.25), ("\\xf1", [0xF1], -0.25)]


@pytest.mark.parametrize("asked", [{"logprobs": True}, {"logprobs": True, "top_logprobs": 0}])
async def test_chat_logprobs_without_alternatives(
    client: openai.AsyncOpenAI, dispatcher: ScriptedDispatcher, asked: dict[str, Any]
) -> None:
    dispatcher.script = says_scored("hi")
    logprobs = (await client.chat.completions.create(**CHAT, **asked)).choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [(item.logprob, item.top_logprobs) for item in logprobs.content] == [(-0.5, []), (-1.5, []), (-2.5, [])]


@pytest.mark.parametrize("asked", [{}, {"logprobs": False}, {"logprobs": False, "top_logprobs": 0}])
async def test_no_logprobs_unless_asked(
    client: openai.AsyncOpenAI, dispatcher: ScriptedDispatcher, asked: dict[str, Any]
) -> None:
    dispatcher.script = says_scored("hi")
    assert (await client.chat.completions.create(**CHAT, **asked)).choices[0].logprobs is None
    assert dispatcher.requests[0].sampling.top_logprobs is None


@pytest.mark.parametrize("tokens_a_delta", [1, 3])
@pytest.mark.parametrize("streamed", [False, True])
async def test_completion_logprobs(
    client: openai.AsyncOpenAI, dispatcher: ScriptedDispatcher, streamed: bool, tokens_a_delta: int
) -> None:
    dispatcher.script = says_scored("hé!", tokens_a_delta)
    asked: Any = {"model": "tiny", "prompt": "hi", "logprobs": 1, "stream": streamed}
    answer = await client.completions.create(**asked)
    choices = [chunk.choices[0] async for chunk in answer] if streamed else [answer.choices[0]]
    found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for logprobs in [choice.logprobs for choice in choices if choice.logprobs]:
        for name, values in found.items():
            values += getattr(logprobs, name)
    tokens = ["h", "bytes:\\xc3", "bytes:\\xa9", "!", "<end>"]
    assert found["tokens"] == tokens
    assert found["token_logprobs"] == [-0.5, -1.5, -2.5, -3.5, -4.5]
    assert found["text_offset"] == [0, 1, 1, 2, 3]
    assert found["top_logprobs"] == [
        {"bytes:\\xf0": -0.25, token: logprob} for token, logprob in zip(tokens, found["token_logprobs"], strict=True)
    ]


async def test_logprobs_of_text_that_is_held_back_come_at_once(
    client: openai.AsyncOpenAI, dispatcher: ScriptedDispatcher
) -> None:
    dispatcher.script = says_scored("one STO")
    stream = await client.completions.create(model="tiny", prompt="hi", stop="STOP", logprobs=0, stream=True)
    choices = [chunk.choices[0] async for chunk in stream]
    assert [choice.text for choice in choices] == ["o", "n", "e", " ", "", "", "", "STO", ""]
    assert [choice.logprobs.tokens for choice in choices[:-1] if choice.logprobs] == [[c] for c in "one STO"] + [
        ["<end>"]
    ]
    offsets = [choice.logprobs.text_offset for choice in choices[:-1] if choice.logprobs]
    assert offsets == [[index] for index in range(8)]
    assert dispatcher.placements == [Placement.AUTO]


async def test_content_type_does_not_matter(http: aiohttp.ClientSession) -> None:
    raw = json.dumps(CHAT).encode()
    async with http.post("/v1/chat/completions", data=raw, headers={"Content-Type": "text/plain"}) as response:
        assert response.status == 200


async def test_models(client: openai.AsyncOpenAI) -> None:
    models = [model async for model in client.models.list()]
    assert [(model.id, (model.model_extra or {}).get("parent")) for model in models] == [
        ("tiny", None),
        ("tiny-poet", "tiny"),
    ]
    for model in models:
        assert await client.models.retrieve(model.id) == model
        assert model.created == MODEL.created_s
    with pytest.raises(openai.NotFoundError) as caught:
        await client.models.retrieve("huge/one")
    assert caught.value.code == "model_not_found"


async def test_an_adapter_is_asked_for_by_its_name(
    client: openai.AsyncOpenAI, dispatcher: ScriptedDispatcher, metrics: RouterMetrics
) -> None:
    for name, adapter in (("tiny", None), ("tiny-poet", Adapter("tiny-poet", "d1"))):
        answer = await client.completions.create(model=name, prompt="hi")
        chunks = [item async for item in await client.completions.create(model=name, prompt="hi", stream=True)]
        assert {answer.model, *(chunk.model for chunk in chunks)} == {name}
        assert [request.adapter for request in dispatcher.requests[-2:]] == [adapter, adapter]
    with pytest.raises(openai.BadRequestError, match="'poet' is not served here; 'tiny', 'tiny-poet' are"):
        await client.completions.create(model="poet", prompt="hi")
    assert metrics.registry.get_sample_value("tandem_adapter_requests_total", {"adapter": "tiny-poet"}) == 2.0


async def test_health_follows_readiness(http: aiohttp.ClientSession, readiness: Any) -> None:
    async with http.get("/health") as response:
        assert (response.status, await response.json()) == (200, {"status": "ok"})
    readiness.reason = "no ready decode worker"
    async with http.get("/health") as response:
        assert (response.status, (await response.json())["reason"]) == (503, "no ready decode worker")


async def test_unknown_routes_and_methods_answer_in_json(http: aiohttp.ClientSession) -> None:
    async with http.post("/v1/embeddings", json={}) as response:
        assert (response.status, (await response.json())["error"]["type"]) == (404, "invalid_request_error")
    async with http.get("/v1/completions") as response:
        assert response.status == 405
        assert "error" in await response.json()


async def test_metrics_tell_of_requests(http: aiohttp.ClientSession, client: openai.AsyncOpenAI) -> None:
    await client.chat.completions.create(**CHAT)
    with pytest.raises(openai.BadRequestError):
        await client.chat.completions.create(**CHAT, n=0)
    async with http.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    for line in (
        'tandem_requests_total{endpoint="chat_completions",outcome="ok"} 1.0',
        'tandem_requests_total{endpoint="chat_completions",outcome="bad_request"} 1.0',
        "tandem_open_requests 0.0",
        "tandem_prompt_tokens_total 5.0",
        "tandem_output_tokens_total 3.0",
        "tandem_ttft_seconds_count 1.0",
        "tandem_tpot_seconds_count 1.0",
        'vllm:num_requests_running{model_name="tiny"} 0.0',
        'vllm:num_requests_waiting{model_name="tiny"} 0.0',
        'vllm:time_to_first_token_seconds_count{model_name="tiny"} 1.0',
        'vllm:request_success_total{finished_reason="stop",model_name="tiny"} 1.0',
    ):
        assert line in lines, line
