"""Keeps spans in memory, in the place of a collector."""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from prometheus_client import CollectorRegistry

from telemetry.trace_metrics import TraceMetrics
from telemetry.tracing import Tracer


class KeptSpans(SpanExporter):
    """What has ended and was sent."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.spans += spans
        return SpanExportResult.SUCCESS

    def tracer(self, ratio: float = 1.0) -> Tracer:
        metrics = TraceMetrics(CollectorRegistry())
        return Tracer("http://127.0.0.1:1/v1/traces", ratio, "tandem-test", "test-0", metrics, self)

    def tree(self, tracer: Tracer) -> list[str]:
        """All spans so far by their start, indented below their parents; with `!` and why where they failed."""
        tracer.close(30.0)
        by_id = {span.context.span_id: span for span in self.spans}

        def depth(span: ReadableSpan) -> int:
            parent = by_id.get(span.parent.span_id) if span.parent is not None else None
            return 0 if parent is None else depth(parent) + 1

        def line(span: ReadableSpan) -> str:
            return "  " * depth(span) + span.name + ("" if span.status.is_ok else f" !{span.status.description}")

        order = sorted(self.spans, key=lambda span: span.start_time or 0)
        return [line(span) for span in order]
