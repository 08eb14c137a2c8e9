"""Bad input against the whole system: 400 or INVALID_ARGUMENT naming the field, no worker touched, still serving."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import grpc
import pytest
from tandem.v1 import inference_pb2, inference_pb2_grpc

from tests.acceptance.golden import CASES
from tests.acceptance.running_cluster import RunningCluster

SHORT = next(case for case in CASES if case.name == "short")
GOOD: dict[str, Any] = {"model": "SmolLM2-135M-Instruct", "prompt": "Hi", "max_tokens": 4}


def body(**changes: Any) -> bytes:
    return json.dumps({**GOOD, **changes}).encode()


HTTP_CASES = {
    "unknown model": (body(model="gpt-5"), "model"),
    "empty prompt": (body(prompt=""), "prompt"),
    "no tokens": (body(prompt=[]), "prompt"),
    "token outside the vocabulary": (body(prompt=[49152]), "prompt.0"),
    "prompt and max_tokens over the context": (body(prompt=[504] * 8000, max_tokens=500), "max_tokens"),
    "prompt over the context": (body(prompt=[504] * 9000), "prompt"),
    "wrong type": (body(max_tokens="four"), "max_tokens"),
    "a number for a text": (body(prompt=5), "prompt"),
    "unknown field": (body(max_token=4), "max_token"),
    "unknown nested field": (body(stream=True, stream_options={"usage": True}), "stream_options.usage"),
    "NaN temperature": (body().replace(b'"max_tokens": 4', b'"temperature": NaN'), "temperature"),
    "infinite top_p": (body().replace(b'"max_tokens": 4', b'"top_p": Infinity'), "top_p"),
    "2 MB body": (body(prompt="a " * (1 << 20)), "body"),
    "invalid UTF-8": (b'{"model": "\xff"}', "body"),
    "not JSON": (b'{"model": ', "body"),
    "not an object": (b"[]", "body"),
    "too many choices": (body(n=17), "n"),
    "fewer generated than asked for": (body(n=3, best_of=2), "best_of"),
    "not there yet": (body(suffix="end"), "suffix"),
}


@pytest.mark.parametrize("name", HTTP_CASES)
def test_http_names_the_field(pair: RunningCluster, name: str) -> None:
    payload, field = HTTP_CASES[name]
    request = urllib.request.Request(f"{pair.http}/v1/completions", payload, {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=30)
    error = json.load(caught.value)["error"]
    assert caught.value.code == 400
    assert error["type"] == "invalid_request_error"
    assert error["param"] == field, error


def test_no_worker_was_touched_and_good_input_still_works(pair: RunningCluster) -> None:
    """After all of the above: planned requests are counted by the router's log, answers by this one request."""
    log = next(pair.folder.glob("run/*/logs/router.log"))
    planned = log.read_text().count("state=planned")
    for payload, _field in HTTP_CASES.values():
        request = urllib.request.Request(f"{pair.http}/v1/completions", payload, {"Content-Type": "application/json"})
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(request, timeout=30)
    assert log.read_text().count("state=planned") == planned
    answer = pair.complete(list(SHORT.prompt_ids), max_tokens=64)
    assert tuple(answer["choices"][0]["token_ids"]) == SHORT.output_ids
    assert log.read_text().count("state=planned") == planned + 1


GRPC_CASES = {
    "model": inference_pb2.GenerateRequest(text="Hi", model="gpt-5"),
    "input": inference_pb2.GenerateRequest(),
    "text": inference_pb2.GenerateRequest(text=""),
    "token_ids.ids": inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds()),
    "token_ids": inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[504] * 9000)),
    "text: ": inference_pb2.GenerateRequest(text="a " * (1 << 20)),  # 2 MB
    "sampling.temperature": inference_pb2.GenerateRequest(
        text="Hi", sampling=inference_pb2.Sampling(temperature=float("nan"))
    ),
    "stopping.max_tokens": inference_pb2.GenerateRequest(text="Hi", stopping=inference_pb2.Stopping(max_tokens=9000)),
    "prefill_placement": inference_pb2.GenerateRequest(text="Hi", prefill_placement=9),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("field", GRPC_CASES)
def test_grpc_names_the_field_and_touches_no_worker(pair: RunningCluster, field: str) -> None:
    log = next(pair.folder.glob("run/*/logs/router.log"))
    planned = log.read_text().count("state=planned")
    with grpc.insecure_channel(pair.grpc, options=(("grpc.enable_http_proxy", 0),)) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(GRPC_CASES[field], timeout=30))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in caught.value.details()
    assert log.read_text().count("state=planned") == planned


def test_the_gauges_are_back_to_zero(pair: RunningCluster) -> None:
    pair.wait_idle()
    metrics = urllib.request.urlopen(f"{pair.http}/metrics", timeout=10).read().decode()
    assert "\ntandem_open_requests 0.0\n" in metrics
    for item in pair.workers().values():
        text = urllib.request.urlopen(f"http://{item.worker.metrics_address}/metrics", timeout=10).read().decode()
        for line in (
            'tandem_worker_blocks{state="used"} 0.0',
            'tandem_worker_blocks{state="quarantined"} 0.0',
            "tandem_kv_handoffs_open 0.0",
            "tandem_worker_running_requests 0.0",
            "tandem_worker_waiting_requests 0.0",
        ):
            assert line in text, (item.worker.ref.worker_id, line)
        assert f'tandem_worker_blocks{{state="free"}} {float(item.worker.num_blocks)}' in text
