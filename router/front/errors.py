"""One table that maps the error tree to HTTP and gRPC, for every front.

Whatever a front catches goes through `edge_error`; nothing else in router/front/ chooses a status.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, assert_never

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from core.errors import (
    BadRequest,
    InvariantBroken,
    Rejected,
    RejectReason,
    TandemError,
    TransferFailed,
    Unauthenticated,
    WorkerLost,
)
from core.request import FinishReason

REASON_HEADER: Final = "x-tandem-reason"
DOMAIN: Final = "tandem"
RETRY_AFTER_LOSS_S: Final = 1.0  # about what the router needs to see a worker gone and plan around it


class GenerationFailed(TandemError):
    """A worker ended the generation itself, with ERROR or ABORT, after it had been accepted."""

    def __init__(self, reason: FinishReason, message: str) -> None:
        super().__init__(f"generation ended with {reason}: {message or 'no message'}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class EdgeError:
    """What a caller gets to see of an error. `kind` is OpenAI's error type."""

    http_status: int
    grpc_status: grpc.StatusCode
    kind: str
    code: str | None
    message: str
    field: str | None = None
    retry_after_s: float | None = None

    def openai_body(self) -> dict[str, object]:
        """The JSON object OpenAI clients read an error from."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.field, "code": self.code}}

    @property
    def http_headers(self) -> dict[str, str]:
        """Retry-After in whole seconds, rounded up, where a retry can help; the code, which a proxy can read too."""
        headers = {} if self.code is None else {REASON_HEADER: self.code}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.http_status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers

    @property
    def grpc_trailers(self) -> tuple[tuple[str, str | bytes], ...]:
        """google.rpc's details: the code as an ErrorInfo, Retry-After as a RetryInfo; and gRPC's own form of that,
        which clients with a retry policy obey."""
        if self.code is None:
            return ()
        status = status_pb2.Status(code=self.grpc_status.value[0], message=self.message)
        # The code as it is everywhere, although google.rpc would like capitals.
        status.details.add().Pack(error_details_pb2.ErrorInfo(reason=self.code, domain=DOMAIN))
        if self.retry_after_s is None:
            return tuple(rpc_status.to_status(status).trailing_metadata)
        retry_ms = math.ceil(self.retry_after_s * 1000)
        delay = Duration(seconds=retry_ms // 1000, nanos=retry_ms % 1000 * 1_000_000)
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
        return (*rpc_status.to_status(status).trailing_metadata, ("grpc-retry-pushback-ms", str(retry_ms)))


@dataclass(frozen=True, slots=True)
class _Row:
    http_status: int
    grpc_status: grpc.StatusCode
    kind: str
    code: str | None


_UNAVAILABLE: Final = grpc.StatusCode.UNAVAILABLE
_EXHAUSTED: Final = grpc.StatusCode.RESOURCE_EXHAUSTED

_FAILED: Final[Mapping[type[TandemError], _Row]] = {
    WorkerLost: _Row(503, _UNAVAILABLE, "service_unavailable_error", "worker_lost"),
    TransferFailed: _Row(503, _UNAVAILABLE, "service_unavailable_error", "transfer_failed"),
    GenerationFailed: _Row(500, grpc.StatusCode.INTERNAL, "server_error", "generation_failed"),  # would fail again
    InvariantBroken: _Row(500, grpc.StatusCode.INTERNAL, "server_error", "internal_error"),
}
_BAD_REQUEST: Final = _Row(400, grpc.StatusCode.INVALID_ARGUMENT, "invalid_request_error", None)
_UNAUTHENTICATED: Final = _Row(401, grpc.StatusCode.UNAUTHENTICATED, "authentication_error", "invalid_api_key")
_INTERNAL: Final = _FAILED[InvariantBroken]


def edge_error(error: Exception) -> EdgeError:
    """What the caller sees of `error`. An error outside the tree is ours: its text stays in the log."""
    match error:
        case BadRequest():
            return _seen(_BAD_REQUEST, str(error), code=error.code, field=error.field)
        case Rejected():
            return _seen(_rejected(error.reason), str(error), retry_after_s=error.retry_after_s)
        case Unauthenticated():
            return _seen(_UNAUTHENTICATED, str(error))
        case TandemError() if type(error) in _FAILED:
            row = _FAILED[type(error)]
            return _seen(row, str(error), retry_after_s=RETRY_AFTER_LOSS_S if row.http_status == 503 else None)
        case _:
            return _seen(_INTERNAL, "internal error")


def _rejected(reason: RejectReason) -> _Row:
    """429 is "you, or all of you, send too much"; 503 is "we are not able to now"."""
    match reason:
        case RejectReason.NO_WORKER | RejectReason.NO_ADAPTER | RejectReason.TIMEOUT | RejectReason.DRAINING:
            return _Row(503, _UNAVAILABLE, "service_unavailable_error", reason)
        case (
            RejectReason.QUEUE_FULL
            | RejectReason.QUEUE_TIMEOUT
            | RejectReason.SHED
            | RejectReason.SLOW_FIRST_TOKEN
            | RejectReason.TENANT_CONCURRENCY
            | RejectReason.TENANT_TOKENS
        ):
            return _Row(429, _EXHAUSTED, "rate_limit_error", reason)
        case _:
            assert_never(reason)


def renamed(error: BadRequest, names: Mapping[str, str]) -> BadRequest:
    """`error` with the head of its field's path spelled as the caller of this front spelled it."""
    head, dot, rest = error.field.partition(".")
    return BadRequest(names.get(head, head) + dot + rest, error.message, error.code)


def _seen(
    row: _Row, message: str, code: str | None = None, field: str | None = None, retry_after_s: float | None = None
) -> EdgeError:
    return EdgeError(
        http_status=row.http_status,
        grpc_status=row.grpc_status,
        kind=row.kind,
        code=code or row.code,
        message=message,
        field=field,
        retry_after_s=retry_after_s,
    )
