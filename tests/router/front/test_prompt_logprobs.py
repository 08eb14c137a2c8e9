"""Log probabilities of the prompt as clients get them: `prompt_logprobs`, `echo`, and over gRPC."""

from __future__ import annotations

from typing import Any

import aiohttp
import grpc
import pytest
from front_fakes import ByteTokenizer, ScriptedDispatcher, check_grammar, says_scored
from tandem.v1 import inference_pb2, inference_pb2_grpc

from core.errors import BadRequest
from core.request import MAX_TOP_LOGPROBS, GenerateRequest, PromptLogprobs
from kv_transfer.request_codec import encode_prompt_logprobs
from router.front.intake import MAX_PROMPT_LOGPROBS, Draft, Intake, ServedModel

GRPC_DEFAULT_BYTES = 4 << 20


@pytest.fixture
def scored(dispatcher: ScriptedDispatcher) -> ScriptedDispatcher:
    dispatcher.script = says_scored("ok")
    return dispatcher


async def post(http: aiohttp.ClientSession, path: str, **fields: Any) -> dict[str, Any]:
    async with http.post(path, json={"model": "tiny", **fields}) as response:
        assert response.status == 200, await response.text()
        return await response.json()


def token(text: str, logprob: float, rank: int) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": text}


async def test_completions_have_them_in_each_choice(http: aiohttp.ClientSession, scored: ScriptedDispatcher) -> None:
    answer = await post(http, "/v1/completions", prompt="abc", prompt_logprobs=1)
    assert answer["choices"][0]["prompt_logprobs"] == [
        None,
        {"98": token("b", -1.0, 2), "224": token("\ufffd", -0.125, 1)},
        {"99": token("c", -2.0, 3), "224": token("\ufffd", -0.125, 1)},
    ]
    assert answer["choices"][0]["text"] == "ok" and answer["choices"][0]["logprobs"] is None
    assert "prompt_logprobs" not in answer


async def test_chats_have_them_beside_the_choices(http: aiohttp.ClientSession, scored: ScriptedDispatcher) -> None:
    messages = [{"role": "user", "content": "h"}]
    answer = await post(http, "/v1/chat/completions", messages=messages, prompt_logprobs=0)
    assert answer["prompt_logprobs"] == [
        None,
        {"58": token(":", -1.0, 2)},
        {"104": token("h", -2.0, 3)},
        {"10": token("\n", -3.0, 4)},
    ]
    assert "prompt_logprobs" not in answer["choices"][0]


async def test_without_the_field_there_are_none(http: aiohttp.ClientSession, scored: ScriptedDispatcher) -> None:
    answer = await post(http, "/v1/completions", prompt="abc", logprobs=1)
    assert scored.requests[0].prompt_logprobs is None
    assert "prompt_logprobs" not in answer and "prompt_logprobs" not in answer["choices"][0]


async def test_echo_begins_with_the_prompt(http: aiohttp.ClientSession, scored: ScriptedDispatcher) -> None:
    assert (await post(http, "/v1/completions", prompt="abé", echo=True))["choices"][0]["text"] == "abéok"
    assert scored.requests[0].prompt_logprobs is None
    answer = await post(http, "/v1/completions", prompt="ab", echo=True, logprobs=1)
    assert answer["choices"][0]["text"] == "abok"
    assert answer["choices"][0]["logprobs"] == {
        "tokens": ["a", "b", "o", "k", "<end>"],
        "token_logprobs": [None, -1.0, -0.5, -1.5, -2.5],
        "top_logprobs": [
            None,
            {"bytes:\\xe0": -0.125, "b": -1.0},
            {"bytes:\\xf0": -0.25, "o": -0.5},
            {"bytes:\\xf0": -0.25, "k": -1.5},
            {"bytes:\\xf0": -0.25, "<end>": -2.5},
        ],
        "text_offset": [0, 1, 2, 3, 4],
    }


async def test_echo_and_prompt_logprobs_each_have_their_own_number(
    http: aiohttp.ClientSession, scored: ScriptedDispatcher
) -> None:
    answer = await post(http, "/v1/completions", prompt="ab", echo=True, logprobs=0, prompt_logprobs=2)
    assert scored.requests[0].prompt_logprobs == 2
    assert answer["choices"][0]["logprobs"]["top_logprobs"][1] == {"b": -1.0}
    assert list(answer["choices"][0]["prompt_logprobs"][1]) == ["98", "224", "225"]


async def test_over_grpc_they_come_first(channel: grpc.aio.Channel, scored: ScriptedDispatcher) -> None:
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    request = inference_pb2.GenerateRequest(text="abc", prompt_logprobs=1)
    first, *others = [response async for response in stub.Generate(request)]
    assert list(first.prompt_logprobs.logprobs) == [-1.0, -2.0]
    assert list(first.prompt_logprobs.ranks) == [2, 3]
    assert list(first.prompt_logprobs.top_ids) == [0xE0, 0xE0]
    assert not any(response.HasField("prompt_logprobs") for response in others)


async def test_what_fits_into_no_message_is_refused_by_name() -> None:
    """8,192 tokens with 20 alternatives go through a client with gRPC's own bound."""
    model = ServedModel("tiny", 0, 32_768, vocab_size=50_000, eos_token_ids=(9,), weights_digest="")
    intake = Intake(ByteTokenizer(), model, check_grammar)

    async def prepared(num_tokens: int) -> GenerateRequest:
        draft = Draft((49_999,) * num_tokens, "tiny", "r", prompt_logprobs=MAX_TOP_LOGPROBS, max_tokens=1)
        return await intake.prepare(draft)

    assert (await prepared(8192)).prompt_logprobs == MAX_TOP_LOGPROBS
    with pytest.raises(BadRequest, match="prompt_logprobs"):
        await prepared(MAX_PROMPT_LOGPROBS // (MAX_TOP_LOGPROBS + 1) + 1)
    for num_top in (0, MAX_TOP_LOGPROBS):
        count = MAX_PROMPT_LOGPROBS // (num_top + 1)
        most = PromptLogprobs(
            num_top, (-1.5,) * count, (200_000,) * count, (200_000,) * (count * num_top), (-1.5,) * (count * num_top)
        )
        message = encode_prompt_logprobs(most)
        assert message is not None and message.ByteSize() < GRPC_DEFAULT_BYTES
