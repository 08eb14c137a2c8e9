"""Requests of every kind as streams over both fronts: what each said, and how long its client waited for more."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import grpc
from tandem.v1 import inference_pb2, inference_pb2_grpc

from tests.acceptance.golden import CASES
from tests.acceptance.running_cluster import RunningCluster

LIMIT_S = 400.0
SAMPLED = {"temperature": 0.9, "seed": 11, "top_p": 0.95}
PENALISED = {"temperature": 1.1, "seed": 3, "presence_penalty": 0.5, "repetition_penalty": 1.1, "min_p": 0.02}
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 24}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)


@dataclass(frozen=True)
class Case:
    """One request. `sampling` and `stopping` are spelled alike on both fronts, the rest by each."""

    name: str
    prompt_ids: tuple[int, ...]
    sampling: dict[str, Any]
    stopping: dict[str, Any]
    n: int = 1
    top_logprobs: int | None = None
    json_schema: str | None = None


@dataclass
class Choice:
    """Everything that a client sees of one output."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str = ""


@dataclass
class Said:
    """A whole answer. gaps_s: the waits for the first and for each next piece of it."""

    choices: dict[int, Choice] = field(default_factory=dict)
    gaps_s: list[float] = field(default_factory=list)


class StreamFailed(Exception):
    """What the client saw instead of the rest."""


def make_cases(max_tokens: int) -> list[Case]:
    """Streams of up to `max_tokens`; each kind with a prompt of its own length."""
    golden = {case.name: case for case in CASES}
    prose = golden["prose_1500"].prompt_ids
    story = golden["story"]
    long = {"max_tokens": max_tokens, "ignore_eos": True}
    words = story.output_text.split()
    return [
        Case("greedy", golden["short"].prompt_ids, {"temperature": 0.0}, long),
        Case("greedy, long prompt", prose[:600], {"temperature": 0.0}, long),
        Case("sampled", prose[:150], SAMPLED, long),
        Case("penalties", story.prompt_ids, PENALISED, long),
        Case("two choices", prose[:64], SAMPLED, long, n=2),
        Case("logprobs", prose[:33], {"temperature": 0.0}, long, top_logprobs=3),
        Case("sampled logprobs, two choices", prose[:90], PENALISED, long, n=2, top_logprobs=1),
        Case(
            "stop string", story.prompt_ids, {"temperature": 0.0},
            {"max_tokens": max_tokens, "stop": [f"{words[20]} {words[21]}", "never there"]},
        ),
        Case(
            "grammar", golden["chat_capital"].prompt_ids, {"temperature": 1.0, "seed": 4}, {"max_tokens": max_tokens},
            json_schema=SCHEMA,
        ),
    ]  # fmt: skip


class Clients:
    """Streams of one cluster over HTTP and gRPC."""

    def __init__(self, cluster: RunningCluster, http: aiohttp.ClientSession, channel: grpc.aio.Channel) -> None:
        self._cluster = cluster
        self._http = http
        self._stub = inference_pb2_grpc.InferenceServiceStub(channel)

    async def say(self, front: str, case: Case, salt: str) -> Said:
        """Raises StreamFailed, with what the client was told."""
        said = Said({index: Choice() for index in range(case.n)})
        waits_since_s = time.monotonic()
        pieces = self._over_http(case, salt) if front == "http" else self._over_grpc(case, salt)
        try:
            async for index, piece in pieces:
                now_s = time.monotonic()
                said.gaps_s.append(now_s - waits_since_s)
                waits_since_s = now_s
                choice = said.choices[index]
                choice.token_ids += piece.token_ids
                choice.text += piece.text
                choice.logprobs += piece.logprobs
                choice.finish_reason = piece.finish_reason or choice.finish_reason
        except grpc.RpcError as error:
            raise StreamFailed(f"{error.code().name}: {error.details()}") from None
        except (aiohttp.ClientError, TimeoutError) as error:
            raise StreamFailed(f"{type(error).__name__}: {error}") from None
        if not all(choice.finish_reason for choice in said.choices.values()):
            raise StreamFailed("it ended without a finish reason")
        return said

    async def _over_http(self, case: Case, salt: str) -> AsyncIterator[tuple[int, Choice]]:
        body = {
            "model": self._cluster.model, "prompt": list(case.prompt_ids), "stream": True, "return_token_ids": True,
            "cache_salt": salt, "n": case.n, **case.sampling, **case.stopping,
        }  # fmt: skip
        if case.top_logprobs is not None:
            body["logprobs"] = case.top_logprobs
        if case.json_schema is not None:
            body["structured_outputs"] = {"json": json.loads(case.json_schema)}
        done = False
        async with self._http.post(f"{self._cluster.http}/v1/completions", json=body) as response:
            if response.status != 200:
                raise StreamFailed(f"{response.status}: {await response.text()}")
            async for line in response.content:
                done = done or line.startswith(b"data: [DONE]")
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise StreamFailed(str(chunk["error"]))
                for item in chunk["choices"]:
                    logprobs = item.get("logprobs") or {}
                    rows = zip(*(logprobs.get(name) or () for name in HTTP_LOGPROBS), strict=True)
                    yield (
                        item["index"],
                        Choice(item.get("token_ids") or [], item["text"], list(rows), item["finish_reason"] or ""),
                    )
        if not done:
            raise StreamFailed("no [DONE]")

    async def _over_grpc(self, case: Case, salt: str) -> AsyncIterator[tuple[int, Choice]]:
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=case.prompt_ids),
            cache_salt=salt,
            n=case.n,
            sampling=inference_pb2.Sampling(**case.sampling, top_logprobs=case.top_logprobs),
            stopping=inference_pb2.Stopping(**case.stopping),
        )
        if case.json_schema is not None:
            request.constraint.json_schema = case.json_schema
        async for response in self._stub.Generate(request, timeout=LIMIT_S):
            logprobs = [item.SerializeToString(deterministic=True) for item in response.logprobs]
            yield response.choice, Choice(list(response.token_ids), response.text, logprobs, response.finish_reason)


HTTP_LOGPROBS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def first_difference(expected: Said, said: Said) -> str:
    """Where two answers part, or "" when they are equal: tokens, text, log probabilities to the bit, and the end."""
    for index, choice in expected.choices.items():
        other = said.choices[index]
        for name in ("token_ids", "text", "logprobs", "finish_reason"):
            wanted, got = getattr(choice, name), getattr(other, name)
            if wanted != got:
                place = next((i for i, pair in enumerate(zip(wanted, got, strict=False)) if pair[0] != pair[1]), -1)
                lengths = f"{len(wanted)} and {len(got)}"
                return f"choice {index}: {name} differ at {place}, lengths {lengths}: {wanted!r} became {got!r}"
    return ""
