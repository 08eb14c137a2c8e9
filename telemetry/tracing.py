"""Spans of requests across processes, sent by OTLP over HTTP. Imported only where a collector is configured.

A span's place in its trace travels as a W3C `traceparent`: in an HTTP header, in gRPC metadata, in commands to workers.
Spans that have ended wait in a bounded queue, which a thread sends: a collector that is slow or away costs spans, never
a request, and is counted.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Final

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from telemetry.logs import log_state
from telemetry.trace_metrics import SpanLoss, TraceMetrics

logger = logging.getLogger(__name__)

Attribute = str | int | float | bool | tuple[str, ...]

SEND_TIMEOUT_S: Final = 5.0  # for one batch, repetitions included
MAX_WAITING_SPANS: Final = 4096  # a few MB
MAX_EVENTS: Final = 64  # of one span: a long prompt has many chunks
_W3C: Final = TraceContextTextMapPropagator()


class Span:
    """One that is sampled. Attributes and events may be added until it ends."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    @property
    def traceparent(self) -> str:
        """For a child, in this process or another."""
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, trace.set_span_in_context(self._span))
        return carrier["traceparent"]

    @property
    def trace_id(self) -> str:
        """As 32 hexadecimal digits."""
        return trace.format_trace_id(self._span.get_span_context().trace_id)

    def set(self, attributes: Mapping[str, Attribute | None]) -> None:
        """Those that are None are left out."""
        self._span.set_attributes({name: value for name, value in attributes.items() if value is not None})

    def event(self, name: str, attributes: Mapping[str, Attribute]) -> None:
        self._span.add_event(name, attributes)

    def end(self, error: str | None = None) -> None:
        """error: why what it stands for failed. Only the first call counts."""
        if error is not None and self._span.is_recording():
            self._span.set_status(trace.StatusCode.ERROR, error)
        self._span.end()


class _QueueLength:
    """How many spans wait, as the processor has them: it drops the oldest of a full queue, and tells nobody but a meter
    of OpenTelemetry's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_waiting = 0

    def added(self) -> bool:
        """Whether it was full, and one was dropped."""
        with self._lock:
            is_full = self._num_waiting == MAX_WAITING_SPANS
            self._num_waiting += not is_full
            return is_full

    def taken(self, num_spans: int) -> None:
        with self._lock:
            self._num_waiting -= num_spans


class _Collector(SpanExporter):
    """Counts spans that do not arrive. Says once that they do not, and once that they do again: OpenTelemetry says it
    with each batch."""

    def __init__(self, exporter: SpanExporter, metrics: TraceMetrics, queue: _QueueLength) -> None:
        self._exporter = exporter
        self._metrics = metrics
        self._queue = queue
        self._there = True
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._queue.taken(len(spans))
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            self._heard(result is SpanExportResult.SUCCESS, len(spans))
        return result

    def _heard(self, there: bool, num_spans: int) -> None:
        if not there:
            self._metrics.lost(SpanLoss.NOT_DELIVERED, num_spans)
        if there is not self._there:
            self._there = there
            state = "collector back" if there else "collector away"
            log_state(logger, logging.INFO if there else logging.WARNING, state=state, num_spans=num_spans)

    def shutdown(self) -> None:
        self._exporter.shutdown()


class _Batches(BatchSpanProcessor):
    """Counts spans that its queue had no room for."""

    def __init__(self, exporter: SpanExporter, metrics: TraceMetrics, queue: _QueueLength) -> None:
        super().__init__(exporter, max_queue_size=MAX_WAITING_SPANS)
        self._metrics = metrics
        self._queue = queue

    def on_end(self, span: ReadableSpan) -> None:
        if self._queue.added():
            self._metrics.lost(SpanLoss.QUEUE_FULL, 1)
        super().on_end(span)


class Tracer:
    """One process's.

    endpoint: a collector's URL of traces, http://collector:4318/v1/traces. ratio: of the requests that come without a
    decision of their caller's, the part that is traced. service: what the process is; instance: which one of them.
    exporter: for tests.
    """

    def __init__(
        self,
        endpoint: str,
        ratio: float,
        service: str,
        instance: str,
        metrics: TraceMetrics,
        exporter: SpanExporter | None = None,
    ) -> None:
        queue = _QueueLength()
        otlp = exporter or OTLPSpanExporter(endpoint=endpoint, timeout=SEND_TIMEOUT_S)
        self._exporter = _Collector(otlp, metrics, queue)
        self._processor = _Batches(self._exporter, metrics, queue)
        provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(ratio)),
            resource=Resource.create({"service.name": service, "service.instance.id": instance}),
            span_limits=SpanLimits(max_events=MAX_EVENTS),
            shutdown_on_exit=False,  # it would wait for a collector that is away
        )
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("tandem")

    def start(self, name: str, parent: str | None, *, serves: bool = False, start_ns: int | None = None) -> Span | None:
        """None: not sampled, so that nothing is to be done below it either.

        parent: a traceparent; one that is malformed counts as none. serves: it answers another process. start_ns: when
        it began, by time.time_ns; None: now.
        """
        context = _W3C.extract({"traceparent": parent} if parent else {})
        kind = trace.SpanKind.SERVER if serves else trace.SpanKind.INTERNAL
        span = self._tracer.start_span(name, context, kind, start_time=start_ns)
        return Span(span) if span.is_recording() else None

    def close(self, timeout_s: float) -> None:
        """Send what waits, for so long at most; the rest is lost. Blocks."""
        sending = threading.Thread(target=self._processor.force_flush, daemon=True)
        sending.start()
        sending.join(timeout_s)
        self._exporter.shutdown()  # ends what still waits to be sent again
