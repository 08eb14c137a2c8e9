"""Requests with any combination of odd fields are served or refused by a field's name; nothing is an error of ours."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import pytest
from front_fakes import END, ScriptedDispatcher, scores_of
from test_openai_bad_input import GOOD, PATHS

from core.request import FinishReason, GenerateRequest, TokenDelta, TokenLogprobs

NUM_REQUESTS = 150
ODD: dict[str, list[Any]] = {
    "n": [1, 2, 16, 17],
    "best_of": [1, 3, 16],
    "stream": [True, True, False, None],
    "stream_options": [{"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}, {}, None],
    "logprobs": [True, False, 0, 5, None],
    "top_logprobs": [0, 20],
    "echo": [True, False],
    "prompt_logprobs": [0, 3],
    "max_tokens": [1, 3, 40, 62, None],
    "max_completion_tokens": [1, 3],
    "min_tokens": [0, 1, 3, 50],
    "temperature": [0, 2, 1e-300, 5e-324],
    "top_p": [1e-300, 1],
    "top_k": [-1, 0, 1, 10**18],
    "min_p": [0, 1, 5e-324],
    "seed": [0, 2**63 - 1],
    "repetition_penalty": [1e-300, 1, 2],
    "presence_penalty": [-2, 2],
    "frequency_penalty": [-2, 2],
    "logit_bias": [{}, {"0": -100}, {"256": 100}, {str(token): -100 for token in range(257)}, {"5": 1, "05": 2}],
    "stop": ["", "o", ["o", "k"], ["é"] * 16, "\u0000", [], None],
    "stop_token_ids": [[], [0], [END] * 128, list(range(128))],
    "ignore_eos": [True],
    "cache_salt": ["", "x" * 256, "\u0000", "\ud800"],
    "priority": [-100, 0, 100],
    "user": ["", "x" * 1000],
    "metadata": [{}, {"": ""}],
    "store": [False, None],
    "return_token_ids": [True],
    "response_format": [{"type": "text"}, {"type": "json_object"}, {"type": "json_schema"}],
    "guided_regex": ["a*", "wrong", ""],
    "guided_choice": [["a"], []],
    "structured_outputs": [{"regex": "a*"}, {}],
    "tandem": [{"prefill": "local"}, {"prefill": "remote"}, {}],
    "messages": [[], [{"role": "user", "content": ""}], [{"role": "tool", "content": "x"}]],
    "prompt": ["", "\u0000", [END], [[1, 2]], ["hi"]],
    "suffix": ["", None],
    "tools": [[], None],
    "tool_choice": ["none", None],
}


async def speak(request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
    """All that was asked for, in two tokens of each choice."""
    num_top = request.sampling.top_logprobs
    top = tuple((index, -0.25) for index in range(num_top or 0))
    for position, token_id in enumerate((ord("o"), END)):
        for choice in range(request.num_choices):
            yield TokenDelta(
                request_id=request.request_id,
                position=position,
                token_ids=(token_id,),
                finish_reason=FinishReason.STOP if token_id == END else None,
                logprobs=() if num_top is None else (TokenLogprobs(-0.5, top),),
                prompt_logprobs=scores_of(request) if position == choice == 0 else None,
                choice=choice,
            )


@pytest.mark.parametrize("kind", PATHS)
async def test_any_combination_is_served_or_refused_by_name(
    http: aiohttp.ClientSession, dispatcher: ScriptedDispatcher, kind: str
) -> None:
    dispatcher.script = speak
    rng, seen = random.Random(kind), Counter[int]()
    for _ in range(NUM_REQUESTS):
        names = rng.sample(sorted(ODD), rng.randrange(1, 6))
        body = {**GOOD[kind], **{name: rng.choice(ODD[name]) for name in names}}
        async with http.post(PATHS[kind], data=json.dumps(body)) as response:
            text = await response.text()
            seen[response.status] += 1
            assert response.status in (200, 400), (response.status, text, body)
            if response.status == 400:
                assert json.loads(text)["error"]["param"].partition(".")[0] in body, (text, body)
            elif body.get("stream"):
                assert text.endswith("data: [DONE]\n\n") and '"error"' not in text, (text, body)
    assert min(seen[200], seen[400]) > NUM_REQUESTS / 10, seen


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        ('{"model": "tiny", "prompt": "hi", "max_tokens": 1, "max_tokens": 50}', "max_tokens"),
        ('{"model": "tiny", "prompt": "hi", "tandem": {"prefill": "local", "prefill": "remote"}}', "prefill"),
        ('{"model": "tiny", "prompt": "hi", "": 1, "": 2}', "body"),
    ],
)
async def test_a_field_that_stands_twice_is_refused(
    http: aiohttp.ClientSession, dispatcher: ScriptedDispatcher, raw: str, param: str
) -> None:
    async with http.post(PATHS["completion"], data=raw) as response:
        error = (await response.json())["error"]
        assert (response.status, error["param"]) == (400, param) and "twice" in error["message"]
    async with http.post(PATHS["completion"], json=GOOD["completion"]) as response:
        assert response.status == 200
    assert len(dispatcher.requests) == 1
