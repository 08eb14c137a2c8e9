"""One request is one trace: spans of router, prefill worker and decode worker at a real collector."""

from __future__ import annotations

import secrets

from tests.acceptance.otlp_receiver import OtlpReceiver, ReceivedSpan
from tests.acceptance.running_cluster import RunningCluster, wait_until

WAY = {
    "text_completion",
    "text_completion/wait",
    "text_completion/attempt",
    "text_completion/attempt/reserve",
    "text_completion/attempt/prefill",
    "text_completion/attempt/decode",
    "text_completion/attempt/decode worker",
    "text_completion/attempt/decode worker/reserve",
    "text_completion/attempt/decode worker/receive",
    "text_completion/attempt/decode worker/decode",
    "text_completion/attempt/prefill worker",
    "text_completion/attempt/prefill worker/queue",
    "text_completion/attempt/prefill worker/compute",
    "text_completion/attempt/prefill worker/transfer",
}


def way(spans: dict[str, ReceivedSpan]) -> set[str]:
    """Each span's names from the outermost one on."""

    def path(span: ReceivedSpan) -> str:
        parent = spans.get(span.parent_id)
        return span.name if parent is None else f"{path(parent)}/{span.name}"

    return {path(span) for span in spans.values()}


def test_a_request_is_one_trace_through_router_and_workers(pair: RunningCluster, collector: OtlpReceiver) -> None:
    trace_id, caller_id = secrets.token_hex(16), secrets.token_hex(8)
    fields = {"max_tokens": 8, "ignore_eos": True, "tandem": {"prefill": "remote"}, "cache_salt": trace_id}
    headers = {"traceparent": f"00-{trace_id}-{caller_id}-01"}
    pair.complete(list(range(100, 180)), headers=headers, **fields)
    want = {name.replace("text_completion", f"text_completion {pair.model}", 1) for name in WAY}
    wait_until(lambda: way(collector.of_trace(trace_id)) == want, 30.0, lambda: str(way(collector.of_trace(trace_id))))
    spans = collector.of_trace(trace_id).values()
    assert {span.name for span in spans if span.parent_id == caller_id} == {f"text_completion {pair.model}"}
    services = {span.name: span.service for span in spans if span.name.endswith((" worker", "attempt"))}
    workers = dict.fromkeys(("prefill worker", "decode worker"), "tandem-worker")
    assert services == {"attempt": "tandem-router", **workers}
    (attempt,) = [span for span in spans if span.name == "attempt"]
    assert attempt.attributes["tandem.reason"] == "asked"


def test_who_brings_no_trace_is_not_traced(pair: RunningCluster, collector: OtlpReceiver) -> None:
    """The cluster is told to decide for nobody. A traced request after it has been received: so would it have been."""
    num_spans = len(collector.spans)
    pair.complete([1, 2, 3], max_tokens=1)
    trace_id = secrets.token_hex(16)
    pair.complete([1, 2, 3], max_tokens=1, headers={"traceparent": f"00-{trace_id}-{secrets.token_hex(8)}-01"})
    wait_until(lambda: any(span.name == "decode worker" for span in collector.of_trace(trace_id).values()), 30.0)
    assert {span.trace_id for span in collector.spans[num_spans:]} == {trace_id}
