"""What is traced, how a trace goes on in another process, and that no request waits for a collector."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from telemetry.tracing import MAX_WAITING_SPANS, TraceConfig, Tracer
from tests.telemetry.spans import KeptSpans

CALLER: Final = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NOT_SAMPLED: Final = CALLER[:-2] + "00"


def tracer_of(exporter: SpanExporter, ratio: float = 1.0) -> Tracer:
    return Tracer(TraceConfig("http://127.0.0.1:1/v1/traces", ratio), "tandem-test", "test-0", exporter)


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
    exporter = StuckExporter()
    tracer = tracer_of(exporter)
    for _ in range(3 * MAX_WAITING_SPANS):
        span = tracer.start("s", None)
        assert span is not None
        span.end()
    assert exporter.entered.wait(30.0)
    tracer.close(0.05)
    assert exporter.num_spans == 0
    exporter.go_on.set()
    tracer.close(30.0)
    assert 0 < exporter.num_spans <= 2 * MAX_WAITING_SPANS


def test_a_collector_that_is_away_is_an_error_of_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """The real exporter, to a port where nobody listens."""
    tracer = Tracer(TraceConfig("http://127.0.0.1:1/v1/traces", 1.0), "tandem-test", "test-0")
    span = tracer.start("s", None)
    assert span is not None
    span.end()
    tracer.close(0.05)
    tracer.close(30.0)  # its thread is done, and says nothing in later tests
    assert [record.getMessage() for record in caplog.records] == ['state="collector away" num_spans=1']


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
        span = tracer.start("s", None)
        assert span is not None
        span.end()
        tracer.close(30.0)
    assert [record.getMessage() for record in caplog.records] == [
        'state="collector away" num_spans=1',
        'state="collector back" num_spans=1',
    ]
