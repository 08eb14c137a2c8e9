"""What is traced, how a trace goes on in another process, and that no request waits for a collector."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from prometheus_client import CollectorRegistry

from telemetry.open_tracer import open_tracer
from telemetry.trace_metrics import SpanLoss, TraceMetrics
from telemetry.tracing import MAX_WAITING_SPANS, Tracer
from tests.acceptance.otlp_receiver import OtlpReceiver
from tests.telemetry.spans import KeptSpans

CALLER: Final = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NOT_SAMPLED: Final = CALLER[:-2] + "00"


NOBODY: Final = "http://127.0.0.1:1/v1/traces"


def tracer_of(exporter: SpanExporter, ratio: float = 1.0, registry: CollectorRegistry | None = None) -> Tracer:
    metrics = TraceMetrics(registry or CollectorRegistry())
    return Tracer(NOBODY, ratio, "tandem-test", "test-0", metrics, exporter)


def end_spans(tracer: Tracer, number: int) -> None:
    for _ in range(number):
        span = tracer.start("s", None)
        assert span is not None
        span.end()


def lost(registry: CollectorRegistry) -> dict[str, float | None]:
    name = "tandem_trace_spans_lost_total"
    return {reason: registry.get_sample_value(name, {"reason": reason}) for reason in SpanLoss}


def test_a_trace_goes_on_below_its_caller_and_in_another_process() -> None:
    here, there = KeptSpans(), KeptSpans()
    first, second = tracer_of(here), tracer_of(there, ratio=0.0)
    outer = first.start("outer", CALLER, serves=True)
    assert outer is not None
    inner = second.start("inner", outer.traceparent)
    assert inner is not None
    inner.end("lost")
    outer.set({"tandem.kept": 1, "tandem.left_out": None})
    outer.end()
    outer.end("too late")
    first.close(5.0)
    second.close(5.0)
    (outer_span,), (inner_span,) = here.spans, there.spans
    assert f"{outer_span.context.trace_id:032x}" == CALLER.split("-")[1] == outer.trace_id
    assert outer_span.parent is not None and f"{outer_span.parent.span_id:016x}" == CALLER.split("-")[2]
    assert inner_span.parent is not None and inner_span.parent.span_id == outer_span.context.span_id
    assert dict(outer_span.attributes or {}) == {"tandem.kept": 1}
    assert outer_span.status.is_ok and inner_span.status.description == "lost"
    assert outer_span.resource.attributes["service.name"] == "tandem-test"


@pytest.mark.parametrize(
    ("ratio", "parent", "is_traced"),
    [
        (0.0, CALLER, True),
        (1.0, NOT_SAMPLED, False),
        (1.0, None, True),
        (0.0, None, False),
        (1.0, "00-nonsense", True),  # as without one
        (0.0, "00-nonsense", False),
    ],
)
def test_the_caller_decides_else_the_ratio(ratio: float, parent: str | None, is_traced: bool) -> None:
    assert (tracer_of(KeptSpans(), ratio).start("s", parent) is not None) is is_traced


class StuckExporter(SpanExporter):
    """A collector that takes a batch and never answers, until it is let go."""

    def __init__(self) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.num_spans = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.entered.set()
        self.go_on.wait(60.0)
        self.num_spans += len(spans)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        pass


def test_a_collector_that_hangs_costs_spans_and_holds_up_nobody() -> None:
    """Were a span to wait for the collector, this would wait for ever."""
    exporter, registry = StuckExporter(), CollectorRegistry()
    tracer = tracer_of(exporter, registry=registry)
    end_spans(tracer, 3 * MAX_WAITING_SPANS)
    assert exporter.entered.wait(30.0)
    tracer.close(0.05)
    assert exporter.num_spans == 0
    exporter.go_on.set()
    tracer.close(30.0)
    assert 0 < exporter.num_spans <= 2 * MAX_WAITING_SPANS
    # Each span has arrived or is counted as lost.
    assert lost(registry) == {"queue_full": 3 * MAX_WAITING_SPANS - exporter.num_spans, "not_delivered": 0}


def test_a_collector_that_is_away_is_an_error_of_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """The real exporter, to a port where nobody listens."""
    registry = CollectorRegistry()
    tracer = open_tracer(NOBODY, 1.0, "tandem-test", "test-0", registry)
    assert tracer is not None
    end_spans(tracer, 1)
    tracer.close(0.05)
    tracer.close(30.0)  # its thread is done, and says nothing in later tests
    assert [record.getMessage() for record in caplog.records] == ['state="collector away" num_spans=1']
    assert lost(registry) == {"queue_full": 0, "not_delivered": 1}


@pytest.mark.parametrize(("status", "num_lost"), [(200, 0), (400, 3)])
def test_what_a_collector_refuses_is_counted(status: int, num_lost: int) -> None:
    """Over the real exporter: one that takes all, and one that wants none."""
    receiver, registry = OtlpReceiver(status), CollectorRegistry()
    try:
        tracer = open_tracer(receiver.endpoint, 1.0, "tandem-test", "test-0", registry)
        assert tracer is not None
        end_spans(tracer, 3)
        tracer.close(30.0)
    finally:
        receiver.close()
    assert len(receiver.spans) == 3 - num_lost
    assert lost(registry) == {"queue_full": 0, "not_delivered": num_lost}


def test_where_nothing_is_traced_there_is_no_series() -> None:
    registry = CollectorRegistry()
    assert open_tracer("", 1.0, "tandem-test", "test-0", registry) is None
    assert lost(registry) == {"queue_full": None, "not_delivered": None}


class FlakyExporter(SpanExporter):
    """Answers as it is told to; then well."""

    def __init__(self, *answers: SpanExportResult) -> None:
        self._answers = list(answers)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return self._answers.pop(0) if self._answers else SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        pass


def test_a_collector_that_goes_and_comes_back_is_two_lines_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    failure = SpanExportResult.FAILURE
    tracer = tracer_of(FlakyExporter(SpanExportResult.SUCCESS, failure, failure, failure))
    for _ in range(6):
        end_spans(tracer, 1)
        tracer.close(30.0)
    assert [record.getMessage() for record in caplog.records] == [
        'state="collector away" num_spans=1',
        'state="collector back" num_spans=1',
    ]
