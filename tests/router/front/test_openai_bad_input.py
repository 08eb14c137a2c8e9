"""Everything wrong with a request is refused by its field's name, before any worker hears of it."""

from __future__ import annotations

import io
import json
from typing import Any

import aiohttp
import pytest
from front_fakes import ScriptedDispatcher

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "hi"}
PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
GOOD = {"chat": CHAT, "completion": COMPLETION}


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi", **fields}]}


BAD_CHAT: list[tuple[dict[str, Any], str, str | None]] = [
    ({"model": "huge"}, "model", "model_not_found"),
    ({"model": 3}, "model", None),
    ({"messages": []}, "messages", None),
    ({"messages": "hi"}, "messages", None),
    ({"messages": [{"role": "user"}]}, "messages.0.content", None),
    (message(content=5), "messages.0.content", None),
    (message(content=None), "messages.0.content", None),
    (message(content="\ud800"), "messages.0.content", None),
    (message(content=[{"type": "text", "text": 5}]), "messages.0.content.0.text", None),
    (message(content=[{"type": "image_url", "text": ""}]), "messages.0.content.0.type", "unsupported_value"),
    (message(role="wizard"), "messages.0.role", None),
    (message(role="assistant"), "messages", None),
    (message(colour="red"), "messages.0.colour", None),
    (message(tool_calls=[{}]), "messages.0.tool_calls", "unsupported_value"),
    (message(content="x" * 64), "messages", "context_length_exceeded"),
    (message(content="x" * 20_000), "messages", "context_length_exceeded"),
    ({"max_tokens": 60}, "max_tokens", "context_length_exceeded"),
    ({"max_completion_tokens": 60}, "max_completion_tokens", "context_length_exceeded"),
    ({"max_completion_tokens": 5, "max_tokens": 6}, "max_completion_tokens", None),
    ({"tools": [{}]}, "tools", "unsupported_value"),
    ({"tool_choice": "required"}, "tool_choice", "unsupported_value"),
    ({"logprobs": 1}, "logprobs", None),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", None),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", None),
    ({"top_logprobs": 2}, "top_logprobs", None),
]
BAD_COMPLETION: list[tuple[dict[str, Any], str, str | None]] = [
    ({"model": "huge"}, "model", "model_not_found"),
    ({"prompt": ""}, "prompt", None),
    ({"prompt": []}, "prompt", None),
    ({"prompt": [""]}, "prompt", None),
    ({"prompt": None}, "prompt", None),
    ({"prompt": {"text": "hi"}}, "prompt", None),
    ({"prompt": ["a", "b"]}, "prompt", "unsupported_value"),
    ({"prompt": [[1], [2]]}, "prompt", "unsupported_value"),
    ({"prompt": [1, "a"]}, "prompt.1", None),
    ({"prompt": [1, 1.5]}, "prompt.1", None),
    ({"prompt": [1, 257]}, "prompt.1", None),
    ({"prompt": [-1]}, "prompt.0", None),
    ({"prompt": "x" * 64}, "prompt", "context_length_exceeded"),
    ({"prompt": "x" * 20_000}, "prompt", "context_length_exceeded"),
    ({"echo": 1}, "echo", None),
    ({"echo": True, "stream": True}, "echo", None),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", None),
    ({"prompt_logprobs": 21}, "prompt_logprobs", None),
    ({"prompt_logprobs": -1}, "prompt_logprobs", None),
    ({"prompt_logprobs": True}, "prompt_logprobs", None),
    ({"best_of": 17}, "best_of", None),
    ({"best_of": 0}, "best_of", None),
    ({"best_of": True}, "best_of", None),
    ({"best_of": 2, "n": 3}, "best_of", None),
    ({"best_of": 2, "stream": True}, "best_of", None),
    ({"logprobs": 6}, "logprobs", None),
    ({"logprobs": -1}, "logprobs", None),
    ({"logprobs": True}, "logprobs", None),
    ({"top_logprobs": 1}, "top_logprobs", None),
    ({"suffix": "end"}, "suffix", "unsupported_value"),
    ({"max_tokens": 63}, "max_tokens", "context_length_exceeded"),
    ({"max_tokens": 0}, "max_tokens", None),
    ({"max_tokens": "5"}, "max_tokens", None),
    ({"max_tokens": 5.0}, "max_tokens", None),
    ({"max_tokens": True}, "max_tokens", None),
    ({"max_tokens": 10**300}, "max_tokens", "context_length_exceeded"),
    ({"min_tokens": -1}, "min_tokens", None),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens", None),
    ({"temperature": float("nan")}, "temperature", None),
    ({"temperature": float("inf")}, "temperature", None),
    ({"temperature": 3}, "temperature", None),
    ({"temperature": "1"}, "temperature", None),
    ({"top_p": 0}, "top_p", None),
    ({"top_p": float("-inf")}, "top_p", None),
    ({"top_k": -2}, "top_k", None),
    ({"seed": -1}, "seed", None),
    ({"seed": 2**63}, "seed", None),
    ({"stop": ""}, "stop", None),
    ({"stop": ["a", 5]}, "stop.1", None),
    ({"stop": 5}, "stop", None),
    ({"stop": ["a"] * 17}, "stop", None),
    ({"stop": "x" * 2000}, "stop.0", None),
    ({"stop_token_ids": [257]}, "stop_token_ids.0", None),
    ({"stop_token_ids": "1"}, "stop_token_ids", None),
    ({"stop_token_ids": [1] * 129}, "stop_token_ids", None),
    ({"prompt": [5] * 64}, "prompt", "context_length_exceeded"),
    ({"prompt": [-1] * 64}, "prompt", "context_length_exceeded"),  # the length comes first: it bounds the work
    ({"stream": "yes"}, "stream", None),
    ({"stream_options": {"include_usage": True}}, "stream_options", None),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", None),
    ({"stream": True, "stream_options": {"colour": 1}}, "stream_options.colour", None),
    ({"n": 0}, "n", None),
    ({"n": -1}, "n", None),
    ({"n": 17}, "n", None),
    ({"n": 2.0}, "n", None),
    ({"n": "2"}, "n", None),
    ({"n": True}, "n", None),
    ({"n": 0, "best_of": 1}, "n", None),
    ({"min_p": -0.1}, "min_p", None),
    ({"min_p": 1.5}, "min_p", None),
    ({"min_p": float("nan")}, "min_p", None),
    ({"repetition_penalty": 0}, "repetition_penalty", None),
    ({"repetition_penalty": -1.1}, "repetition_penalty", None),
    ({"repetition_penalty": float("inf")}, "repetition_penalty", None),
    ({"presence_penalty": 2.5}, "presence_penalty", None),
    ({"presence_penalty": True}, "presence_penalty", None),
    ({"frequency_penalty": -2.1}, "frequency_penalty", None),
    ({"frequency_penalty": "1"}, "frequency_penalty", None),
    ({"logit_bias": {"5": 101}}, "logit_bias.5", None),
    ({"logit_bias": {"5": "1"}}, "logit_bias.5", None),
    ({"logit_bias": {"257": 1}}, "logit_bias.257", None),
    ({"logit_bias": {"-1": 1}}, "logit_bias.-1", None),
    ({"logit_bias": {"five": 1}}, "logit_bias.five", None),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias." + "9" * 5000, None),
    ({"logit_bias": {str(token_id): 1 for token_id in range(1025)}}, "logit_bias", None),
    ({"logit_bias": [[5, 1]]}, "logit_bias", None),
    ({"store": True}, "store", "unsupported_value"),
    ({"metadata": {"a": 5}}, "metadata.a", None),
    ({"tandem": {"prefill": "moon"}}, "tandem.prefill", None),
    ({"tandem": {"colour": 1}}, "tandem.colour", None),
    ({"cache_salt": "x" * 300}, "cache_salt", None),
    ({"priority": -101}, "priority", None),
    ({"priority": 10**40}, "priority", None),
    ({"priority": 1.5}, "priority", None),
    ({"colour": "red"}, "colour", None),
]


async def require_served(http: aiohttp.ClientSession, kind: str, dispatcher: ScriptedDispatcher) -> None:
    """The positive control: the same request without its fault."""
    assert dispatcher.requests == [], "a bad request must not reach the dispatcher"
    async with http.post(PATHS[kind], json=GOOD[kind]) as response:
        assert response.status == 200
    assert len(dispatcher.requests) == 1


def cases() -> list[Any]:
    named = [("chat", *case) for case in BAD_CHAT] + [("completion", *case) for case in BAD_COMPLETION]
    return [
        pytest.param(*case, id=f"{case[0]}-{index}-{case[2][:40]}-{json.dumps(case[1])[:40]}")
        for index, case in enumerate(named)
    ]


@pytest.mark.parametrize(("kind", "change", "param", "code"), cases())
async def test_bad_field(
    http: aiohttp.ClientSession,
    dispatcher: ScriptedDispatcher,
    kind: str,
    change: dict[str, Any],
    param: str,
    code: str | None,
) -> None:
    async with http.post(PATHS[kind], data=json.dumps({**GOOD[kind], **change})) as response:
        error = (await response.json())["error"]
        assert response.status == 400, error
        assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error"), error
        assert error["message"].startswith(param + ": ")
        assert response.headers["x-request-id"]
    await require_served(http, kind, dispatcher)


@pytest.mark.parametrize("field", ["model", "messages"])
async def test_missing_field(http: aiohttp.ClientSession, dispatcher: ScriptedDispatcher, field: str) -> None:
    body = {name: value for name, value in CHAT.items() if name != field}
    async with http.post(PATHS["chat"], json=body) as response:
        assert (response.status, (await response.json())["error"]["param"]) == (400, field)
    await require_served(http, "chat", dispatcher)


BAD_BODIES: list[tuple[str, bytes, str]] = [
    ("empty", b"", "not JSON"),
    ("cut short", b'{"model": "tiny",\n "prompt": ', "line 2 column 12"),
    ("not an object", b"[1]", "must be a JSON object"),
    ("not UTF-8", b'{"model": "tiny", "prompt": "\xff"}', "not UTF-8 at byte 29"),
    ("nested too deep", b"[" * 100_000, "nests too deep"),
    ("too many digits", b'{"seed": ' + b"9" * 5000 + b"}", "too many digits"),
    ("too large", b'{"model": "tiny", "prompt": "' + b"x" * (2 << 20) + b'"}', "exceed"),
]


@pytest.mark.parametrize(("raw", "words"), [case[1:] for case in BAD_BODIES], ids=[case[0] for case in BAD_BODIES])
async def test_bad_body(http: aiohttp.ClientSession, dispatcher: ScriptedDispatcher, raw: bytes, words: str) -> None:
    async with http.post(PATHS["completion"], data=io.BytesIO(raw)) as response:
        error = (await response.json())["error"]
        assert (response.status, error["param"]) == (400, "body")
        assert words in error["message"]
    await require_served(http, "completion", dispatcher)


async def test_a_large_body_of_unknown_length(http: aiohttp.ClientSession, dispatcher: ScriptedDispatcher) -> None:
    async def pieces() -> Any:
        for _ in range(32):
            yield b"x" * 65536

    async with http.post(PATHS["completion"], data=pieces()) as response:
        assert (response.status, (await response.json())["error"]["param"]) == (400, "body")
    await require_served(http, "completion", dispatcher)
