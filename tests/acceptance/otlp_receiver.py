"""A collector of traces on loopback: OTLP over HTTP, as the exporters of routers and workers speak it."""

from __future__ import annotations

import gzip
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """Ids in hexadecimal digits; parent_id is empty for a span without one."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, str]


class OtlpReceiver:
    """Listens at `endpoint` until `close`. status: what it answers; it keeps what it takes, with 200."""

    def __init__(self, status: int = 200) -> None:
        self.spans: list[ReceivedSpan] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                if status == 200:
                    receiver.take(ExportTraceServiceRequest.FromString(body))
                self.send_response(status)
                self.send_header("Content-Type", "application/x-protobuf")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def take(self, request: ExportTraceServiceRequest) -> None:
        for item in request.resource_spans:
            services = [pair.value.string_value for pair in item.resource.attributes if pair.key == "service.name"]
            self.spans += [
                ReceivedSpan(
                    services[0],
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    {pair.key: pair.value.string_value for pair in span.attributes},
                )
                for scope in item.scope_spans
                for span in scope.spans
            ]

    def of_trace(self, trace_id: str) -> dict[str, ReceivedSpan]:
        """The spans of one trace, by id."""
        return {span.span_id: span for span in list(self.spans) if span.trace_id == trace_id}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
