"""Constrained output through the whole cluster: it fits, and where the prompt is prefilled changes nothing."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import openai
import pytest

from tests.acceptance.running_cluster import RunningCluster
from tests.acceptance.test_parity import both_ways

ENDLESS = 'start: "a" "b"{1000000}'
PROMPT = "A short description of a person, as JSON:"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["kind", "tall", "quick"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.2, "seed": 4}])
def test_json_by_schema(pair: RunningCluster, sampling: dict[str, Any]) -> None:
    """The first token is the prefill worker's, the others are decode's: both must stand at the same place."""
    choice = both_ways(pair, prompt=PROMPT, max_tokens=60, structured_outputs={"json": SCHEMA}, **sampling)
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["text"]), SCHEMA)


def test_without_a_constraint_there_is_no_json(pair: RunningCluster) -> None:
    """The positive control of the test above."""
    text = pair.complete(PROMPT, max_tokens=60)["choices"][0]["text"]
    with pytest.raises((ValueError, jsonschema.ValidationError)):
        jsonschema.validate(json.loads(text), SCHEMA)


def test_other_constraints(pair: RunningCluster) -> None:
    date = both_ways(pair, prompt="Date: ", max_tokens=20, structured_outputs={"regex": r"\d{4}-\d\d-\d\d"})
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", date["text"])
    word = both_ways(
        pair, prompt="Yes or no? ", max_tokens=20, guided_choice=["yes, of course", "no, never"], min_tokens=9
    )
    assert word["text"] in ("yes, of course", "no, never") and word["finish_reason"] == "stop"
    only = both_ways(pair, prompt="Go", max_tokens=1, structured_outputs={"grammar": 'start: "x" | "y"'})
    assert only["text"] in ("x", "y")


def test_the_openai_client_gets_its_schema(pair: RunningCluster) -> None:
    client = openai.OpenAI(base_url=f"{pair.http}/v1", api_key="unused", max_retries=0)
    answer = client.chat.completions.create(
        model=pair.model,
        messages=[{"role": "user", "content": "Describe a person."}],
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}},
        temperature=0,
        max_tokens=80,
    )
    jsonschema.validate(json.loads(answer.choices[0].message.content or ""), SCHEMA)


def test_grammars_that_end_badly_leave_the_cluster_as_it_was(pair: RunningCluster) -> None:
    """One does not compile, one ends its compiler, one comes to its bounds only once tokens are drawn."""
    chain = "".join(f"a{index}: (a{index + 1})?\n" for index in range(3000))
    grammars = {"unknown name": "start: a", "nests too deep": f'start: a0\n{chain}a3000: "x"', "dead end": ENDLESS}
    for message, grammar in grammars.items():
        error = refused(pair, structured_outputs={"grammar": grammar})
        assert error["param"] == "structured_outputs.grammar" and message in error["message"]
    both_ways(pair, prompt="Yes or no? ", max_tokens=20, guided_choice=["yes, of course", "no, never"])
    pair.wait_idle()


def refused(cluster: RunningCluster, **fields: Any) -> dict[str, Any]:
    client = openai.OpenAI(base_url=f"{cluster.http}/v1", api_key="unused", max_retries=0)
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(model=cluster.model, prompt="x", max_tokens=8, extra_body=fields)
    assert caught.value.status_code == 400
    body = caught.value.body
    assert isinstance(body, dict)
    return body
