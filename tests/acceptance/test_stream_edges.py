"""Text at the edges of a stream, forced by a grammar: characters and stop strings that are split over tokens and over a
migration, and text that looks like the protocol. (Silent calls and pings: tests/router/front/test_silent_calls.py.)"""

from __future__ import annotations

import itertools
import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from tandem.v1 import inference_pb2, inference_pb2_grpc

from cluster.main import main
from tests.acceptance.running_cluster import RunningCluster, wait_until
from tests.acceptance.test_faults import Streaming

EMOJI = "🪬🧿🦜👩‍👩‍👧🇩🇪"
CJK = "齉龘靐 日本語と中文、한국어。"
PROTOCOL = 'data: [DONE]\n\ndata: {"error": 1}\n\n[DONE] and more'
SALTS = itertools.count()


def pieces_over_http(cluster: RunningCluster, text: str, **fields: Any) -> tuple[list[str], int, list[bytes]]:
    """Text as it came, how many tokens it has, and the raw events. The model can say nothing but `text`."""
    body = {
        "model": cluster.model, "prompt": "Say it:", "stream": True, "temperature": 0, "max_tokens": 200,
        "return_token_ids": True, "structured_outputs": {"choice": [text]}, "cache_salt": f"edge-{next(SALTS)}",
        **fields,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{cluster.http}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        events = [line[6:].rstrip(b"\n") for line in response if line.startswith(b"data: ")]
    chunks = [json.loads(event) for event in events[:-1]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    num_tokens = sum(len(choice.get("token_ids") or ()) for choice in choices)
    return [choice["text"] for choice in choices if choice["text"]], num_tokens, events


def pieces_over_grpc(cluster: RunningCluster, text: str) -> tuple[list[str], int]:
    request = inference_pb2.GenerateRequest(text="Say it:", cache_salt=f"edge-{next(SALTS)}")
    request.sampling.temperature = 0
    request.stopping.max_tokens = 200
    request.constraint.choice.choices.append(text)
    with grpc.insecure_channel(cluster.grpc, options=(("grpc.enable_http_proxy", 0),)) as channel:
        responses = list(inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=120))
    return [item.text for item in responses if item.text], sum(len(item.token_ids) for item in responses)


@pytest.mark.parametrize("text", [EMOJI, CJK], ids=["emoji", "CJK"])
def test_a_character_that_is_split_over_tokens_comes_whole(pair: RunningCluster, text: str) -> None:
    for pieces, num_tokens in (pieces_over_http(pair, text)[:2], pieces_over_grpc(pair, text)):
        assert "".join(pieces) == text
        assert num_tokens > len(text)  # so some characters are more than a token
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
        assert len(pieces) > 3  # it was streamed all the same


def test_what_looks_like_the_end_of_a_stream_is_text(pair: RunningCluster) -> None:
    pieces, _, events = pieces_over_http(pair, PROTOCOL)
    assert "".join(pieces) == PROTOCOL
    assert [index for index, event in enumerate(events) if event == b"[DONE]"] == [len(events) - 1]
    assert "".join(pieces_over_grpc(pair, PROTOCOL)[0]) == PROTOCOL


@pytest.mark.parametrize("stop", ["#&END&#", "🧿🪬"])
def test_a_stop_string_that_is_split_over_tokens_is_never_seen(pair: RunningCluster, stop: str) -> None:
    text = f"one #& two 🧿 {stop} three"
    said, num_tokens, _ = pieces_over_http(pair, text)
    assert "".join(said) == text  # the control
    pieces, stopped_tokens, events = pieces_over_http(pair, text, stop=[stop])
    assert "".join(pieces) == "one #& two 🧿 "
    assert stopped_tokens < num_tokens
    assert json.loads(events[-2])["choices"][0]["finish_reason"] == "stop"


@pytest.fixture
def planned(two_decodes: RunningCluster) -> Iterator[Any]:
    """How often the router has chosen workers so far."""
    log = next(two_decodes.folder.glob("run/*/logs/router.log"))
    yield lambda: log.read_text().count("state=planned")
    two_decodes.wait_idle()


def test_a_stop_string_that_begins_before_a_migration_and_ends_after_it(
    two_decodes: RunningCluster, planned: Any
) -> None:
    """Its beginning is held back, so the client has seen nothing of it when its worker drains."""
    cluster = two_decodes
    stop = " ".join(map(str, range(100, 200)))  # 400 characters, a token each
    stream = Streaming(
        cluster, (504,), max_tokens=1200, stop=[stop], structured_outputs={"choice": [f"Count: {stop} over"]},
        cache_salt=f"edge-{next(SALTS)}",
    )  # fmt: skip
    wait_until(lambda: "Count:" in stream.text, 60.0)
    before = planned()
    (worker_id,) = [
        name for name, worker in cluster.workers().items() if name != "prefill-0" and worker.load.running_requests
    ]
    assert main(["drain", worker_id, "--controller", cluster.controller]) == 0
    assert planned() == before + 1 and stream.text == "Count: " and not stream.done
    stream.join(120)
    assert stream.error is None and stream.done
    assert stream.text == "Count: " and stream.finish_reason == "stop"
    assert main(["role", worker_id, "decode", "--controller", cluster.controller]) == 0
