"""One table that maps the error tree to HTTP and gRPC, for every front.

Whatever a front catches goes through `edge_error`; nothing else in router/front/ chooses a status.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
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
    code: str | None = None
    message: str = ""
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


_BAD_REQUEST: Final = EdgeError(400, grpc.StatusCode.INVALID_ARGUMENT, "invalid_request_error")
_UNAUTHENTICATED: Final = EdgeError(401, grpc.StatusCode.UNAUTHENTICATED, "authentication_error", "invalid_api_key")
_TOO_MUCH: Final = EdgeError(429, grpc.StatusCode.RESOURCE_EXHAUSTED, "rate_limit_error")
_INTERNAL: Final = EdgeError(500, grpc.StatusCode.INTERNAL, "server_error", "internal_error", "internal error")
_UNAVAILABLE: Final = EdgeError(503, grpc.StatusCode.UNAVAILABLE, "service_unavailable_error")

_CODES_OF_LOSS: Final[Mapping[type[TandemError], str]] = {
    WorkerLost: "worker_lost",
    TransferFailed: "transfer_failed",
}


def edge_error(error: Exception) -> EdgeError:
    """What the caller sees of `error`. An error outside the tree is ours: its text stays in the log."""
    match error:
        case BadRequest():
            return replace(_BAD_REQUEST, code=error.code, message=str(error), field=error.field)
        case Rejected():
            row = _rejected(error.reason)
            return replace(row, code=error.reason, message=str(error), retry_after_s=error.retry_after_s)
        case Unauthenticated():
            return replace(_UNAUTHENTICATED, message=str(error))
        case TandemError() if type(error) in _CODES_OF_LOSS:
            code = _CODES_OF_LOSS[type(error)]
            return replace(_UNAVAILABLE, code=code, message=str(error), retry_after_s=RETRY_AFTER_LOSS_S)
        case GenerationFailed():  # so would the next attempt
            return replace(_INTERNAL, code="generation_failed", message=str(error))
        case InvariantBroken():
            return replace(_INTERNAL, message=str(error))
        case _:
            return _INTERNAL


def _rejected(reason: RejectReason) -> EdgeError:
    """429 is "you, or all of you, send too much"; 503 is "we are not able to now"."""
    match reason:
        case RejectReason.NO_WORKER | RejectReason.NO_ADAPTER | RejectReason.TIMEOUT | RejectReason.DRAINING:
            return _UNAVAILABLE
        case (
            RejectReason.QUEUE_FULL
            | RejectReason.QUEUE_TIMEOUT
            | RejectReason.SHED
            | RejectReason.SLOW_FIRST_TOKEN
            | RejectReason.TENANT_CONCURRENCY
            | RejectReason.TENANT_TOKENS
        ):
            return _TOO_MUCH
        case _:
            assert_never(reason)


def renamed(error: BadRequest, names: Mapping[str, str]) -> BadRequest:
    """`error` with the head of its field's path spelled as the caller of this front spelled it."""
    head, dot, rest = error.field.partition(".")
    return BadRequest(names.get(head, head) + dot + rest, error.message, error.code)
