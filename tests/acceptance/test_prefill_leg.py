"""Every parameter of a request beside every other: the prefill worker's leg changes nothing that a client sees.

Each row is asked for twice, prefilled remotely and, as in an aggregated cluster, on the decode worker. The rows hold
every pair of values of every two parameters that go together.
"""

from __future__ import annotations

import itertools
import json
import urllib.request
from collections import defaultdict
from typing import Any

import pytest

from tests.acceptance.golden import CASES
from tests.acceptance.running_cluster import RunningCluster

STORY = next(case for case in CASES if case.name == "story")
STOP = " ".join(STORY.output_text.split()[3:5])  # spans tokens
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 8}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
PARAMETERS: dict[str, tuple[Any, ...]] = {
    "max_tokens": (16, 2, 1),
    "n": (1, 3),
    "min_tokens": (None, 12),
    "logprobs": (None, 2),
    "stop": (None, [STOP, '"b'], ["never there"]),
    "structured_outputs": (None, {"json": SCHEMA}),
    "temperature": (0, 1.0),
    "stream": (False, True),
}


def pairs(row: tuple[Any, ...]) -> set[tuple[int, int, int, int]]:
    """Parameters by their numbers, with the number of each one's value."""
    return {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(row)), 2)}


def rows_with_every_pair() -> list[dict[str, Any]]:
    """Greedily the row that adds most, until nothing is missing."""
    least, most = (list(PARAMETERS).index(name) for name in ("min_tokens", "max_tokens"))
    every = [
        row
        for row in itertools.product(*(range(len(values)) for values in PARAMETERS.values()))
        if (PARAMETERS["min_tokens"][row[least]] or 0) <= PARAMETERS["max_tokens"][row[most]]  # else it is refused
    ]
    missing = set().union(*map(pairs, every))
    rows = []
    while missing:
        best = max(every, key=lambda row: len(pairs(row) & missing))
        missing -= pairs(best)
        rows.append({name: values[index] for (name, values), index in zip(PARAMETERS.items(), best, strict=True)})
    return rows


SALTS = itertools.count()
ROWS = rows_with_every_pair()


def answer(
    cluster: RunningCluster, prefill: str, fields: dict[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Choices and usage, put together where they come in pieces."""
    given = {name: value for name, value in fields.items() if value is not None}
    given |= {"seed": 5, "tandem": {"prefill": prefill}, "cache_salt": f"leg-{next(SALTS)}"}
    if not fields["stream"]:
        whole = cluster.complete(list(STORY.prompt_ids), **given)
        return [seen(choice, [choice]) for choice in whole["choices"]], whole["usage"]
    pieces: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    usage: dict[str, Any] = {}
    body = {"model": cluster.model, "prompt": list(STORY.prompt_ids), "return_token_ids": True, **given}
    body["stream_options"] = {"include_usage": True}
    request = urllib.request.Request(
        f"{cluster.http}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        lines = [line[6:].strip() for line in response if line.startswith(b"data: ")]
    assert lines.pop() == b"[DONE]"
    for chunk in map(json.loads, lines):
        assert "error" not in chunk, chunk
        usage = chunk.get("usage") or usage
        for piece in chunk["choices"]:
            pieces[piece["index"]].append(piece)
    return [seen(pieces[index][-1], pieces[index]) for index in sorted(pieces)], usage


def seen(last: dict[str, Any], pieces: list[dict[str, Any]]) -> dict[str, Any]:
    logprobs = [piece["logprobs"] for piece in pieces if piece.get("logprobs")]
    return {
        "text": "".join(piece["text"] for piece in pieces),
        "token_ids": [token_id for piece in pieces for token_id in piece.get("token_ids") or ()],
        "token_logprobs": [value for item in logprobs for value in item["token_logprobs"]],
        "top_logprobs": [value for item in logprobs for value in item["top_logprobs"]],
        "finish_reason": last["finish_reason"],
    }


@pytest.mark.parametrize("fields", ROWS, ids=[str(number) for number in range(len(ROWS))])
def test_output_is_what_an_aggregated_cluster_says(pair: RunningCluster, fields: dict[str, Any]) -> None:
    remote, remote_usage = answer(pair, "remote", fields)
    local, local_usage = answer(pair, "local", fields)
    assert remote == local
    assert len(remote) == fields["n"]
    for choice in remote:
        num_tokens = len(choice["token_ids"])
        assert 1 <= num_tokens <= fields["max_tokens"]
        assert len(choice["token_logprobs"]) == (num_tokens if fields["logprobs"] else 0)
        assert choice["finish_reason"] == ("length" if num_tokens == fields["max_tokens"] else "stop") or fields["stop"]
    assert remote_usage["completion_tokens"] == local_usage["completion_tokens"]
    moved = remote_usage["tandem"]["kv_blocks_moved"], local_usage["tandem"]["kv_blocks_moved"]
    assert moved[1] == 0 and (moved[0] > 0 or fields["max_tokens"] == 1)


def test_the_rows_tell_parameters_apart(pair: RunningCluster) -> None:
    """The control: a row with one parameter changed says something else."""
    plain = {name: values[0] for name, values in PARAMETERS.items()}
    said = answer(pair, "remote", plain)[0]
    for change in ({"temperature": 1.0}, {"stop": [STOP]}, {"structured_outputs": {"json": SCHEMA}}, {"max_tokens": 2}):
        assert answer(pair, "local", plain | change)[0] != said
    assert answer(pair, "local", plain | {"stream": True})[0] == said
