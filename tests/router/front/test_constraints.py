"""What callers write as constraints becomes one grammar, and what is wrong with it is told under their own words."""

from __future__ import annotations

import json
import re
from typing import Any

import aiohttp
import grpc
import pytest
from front_fakes import ScriptedDispatcher
from tandem.v1 import inference_pb2, inference_pb2_grpc

from core.request import MAX_GRAMMAR_CHARACTERS, Grammar, GrammarKind

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "tiny", "prompt": "hi"}
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {}}}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
OBJECT = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')


def named(schema: Any, **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}}


def outputs(**fields: Any) -> dict[str, Any]:
    return {"structured_outputs": fields}


GOOD: list[tuple[dict[str, Any], Grammar | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, OBJECT),
    (outputs(json_object=True), OBJECT),
    (named(SCHEMA), Grammar(GrammarKind.JSON_SCHEMA, TEXT)),
    (named(SCHEMA, strict=True, description="d"), Grammar(GrammarKind.JSON_SCHEMA, TEXT)),
    (outputs(json=SCHEMA), Grammar(GrammarKind.JSON_SCHEMA, TEXT)),
    (outputs(json=json.dumps(SCHEMA, indent=2)), Grammar(GrammarKind.JSON_SCHEMA, TEXT)),
    ({"guided_json": SCHEMA}, Grammar(GrammarKind.JSON_SCHEMA, TEXT)),
    (outputs(regex="a+"), Grammar(GrammarKind.REGEX, "a+")),
    ({"guided_regex": "a+"}, Grammar(GrammarKind.REGEX, "a+")),
    (outputs(choice=["a.b", "c"]), Grammar(GrammarKind.REGEX, r"a\.b|c")),
    ({"guided_choice": ["a.b", "c"]}, Grammar(GrammarKind.REGEX, r"a\.b|c")),
    (outputs(grammar='start: "a"'), Grammar(GrammarKind.LARK, 'start: "a"')),
    ({"guided_grammar": 'start: "a"'}, Grammar(GrammarKind.LARK, 'start: "a"')),
    ({"guided_grammar": 'root ::= "a"'}, Grammar(GrammarKind.GBNF, 'root ::= "a"')),
    (outputs(grammar='start: "a ::= b"'), Grammar(GrammarKind.LARK, 'start: "a ::= b"')),
]


@pytest.mark.parametrize(("path", "base"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)])
async def test_one_grammar_from_many_spellings(
    http: aiohttp.ClientSession, dispatcher: ScriptedDispatcher, path: str, base: dict[str, Any]
) -> None:
    for fields, _grammar in GOOD:
        async with http.post(path, json={**base, **fields}) as response:
            assert response.status == 200, await response.text()
    assert [request.grammar for request in dispatcher.requests] == [grammar for _fields, grammar in GOOD]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "text", "json_schema": {"name": "x", "schema": {}}}}, "response_format.json_schema"),
    (named(SCHEMA, name="a b"), "response_format.json_schema.name"),
    (named("wrong"), "response_format.json_schema.schema"),
    (named({"wrong": 1}), "response_format.json_schema.schema"),
    (named({"enum": ["x" * MAX_GRAMMAR_CHARACTERS]}), "response_format.json_schema.schema"),
    (outputs(), "structured_outputs"),
    (outputs(xml=1), "structured_outputs.xml"),
    (outputs(json_object=False), "structured_outputs.json_object"),
    (outputs(json=[]), "structured_outputs.json"),
    (outputs(json="{"), "structured_outputs.json"),
    (outputs(json="[]"), "structured_outputs.json"),
    (outputs(json="[" * 50_000), "structured_outputs.json"),
    (outputs(json={"wrong": 1}), "structured_outputs.json"),
    (outputs(regex="wrong"), "structured_outputs.regex"),
    (outputs(regex=""), "structured_outputs.regex"),
    (outputs(regex="a", choice=["b"]), "structured_outputs.choice"),
    (outputs(choice=[]), "structured_outputs.choice"),
    (outputs(choice=["a", ""]), "structured_outputs.choice"),
    (outputs(choice=["a"] * 2000), "structured_outputs.choice"),
    (outputs(grammar="wrong"), "structured_outputs.grammar"),
    ({"guided_json": 3}, "guided_json"),
    ({"guided_regex": "wrong"}, "guided_regex"),
    ({"guided_choice": "a"}, "guided_choice"),
    ({"guided_grammar": ""}, "guided_grammar"),
    ({"guided_regex": "a", "guided_grammar": "b"}, "guided_grammar"),
    ({"guided_regex": "a", **named(SCHEMA)}, "guided_regex"),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
async def test_a_bad_constraint_is_named_and_touches_no_worker(
    http: aiohttp.ClientSession, dispatcher: ScriptedDispatcher, fields: dict[str, Any], param: str
) -> None:
    async with http.post("/v1/chat/completions", json={**CHAT, **fields}) as response:
        error = (await response.json())["error"]
    assert (response.status, error["param"]) == (400, param), error
    assert not dispatcher.requests


@pytest.mark.parametrize("depth", [100, 3000, 50_000])
async def test_a_schema_that_nests_deep_is_refused_or_passed_on(http: aiohttp.ClientSession, depth: int) -> None:
    """What is passed on is refused by the compiler (tests/router/front/test_grammar_gate.py)."""
    schema = '{"allOf":[' * depth + "{}" + "]}" * depth
    for value in (schema, json.dumps(schema)):
        async with http.post(
            "/v1/completions", data=f'{{"model":"tiny","prompt":"x","guided_json":{value}}}'
        ) as response:
            assert response.status == (200 if depth == 100 else 400), await response.text()


def grpc_request(**constraint: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(text="hi", constraint=inference_pb2.Constraint(**constraint))


async def test_constraints_over_grpc(channel: grpc.aio.Channel, dispatcher: ScriptedDispatcher) -> None:
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    good = [
        ({"json_schema": json.dumps(SCHEMA)}, Grammar(GrammarKind.JSON_SCHEMA, TEXT)),
        ({"json_object": True}, OBJECT),
        ({"regex": "a+"}, Grammar(GrammarKind.REGEX, "a+")),
        ({"choice": inference_pb2.Choices(choices=["a.b", "c"])}, Grammar(GrammarKind.REGEX, r"a\.b|c")),
        ({"grammar": 'start: "a"'}, Grammar(GrammarKind.LARK, 'start: "a"')),
    ]
    for constraint, _grammar in good:
        async for _response in stub.Generate(grpc_request(**constraint)):
            pass
    assert [request.grammar for request in dispatcher.requests] == [grammar for _constraint, grammar in good]


@pytest.mark.parametrize(
    ("constraint", "field"),
    [
        ({}, "constraint"),
        ({"json_object": False}, "constraint.json_object"),
        ({"json_schema": "{"}, "constraint.json_schema"),
        ({"regex": "wrong"}, "constraint.regex"),
        ({"choice": inference_pb2.Choices()}, "constraint.choice"),
        ({"grammar": "wrong"}, "constraint.grammar"),
    ],
)
async def test_a_bad_constraint_over_grpc(
    channel: grpc.aio.Channel, dispatcher: ScriptedDispatcher, constraint: dict[str, Any], field: str
) -> None:
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Generate(grpc_request(**constraint)).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert re.match(rf"{field}: ", caught.value.details() or "")
    assert not dispatcher.requests
