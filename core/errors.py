"""The error tree, named by what the caller does next.

TandemError
├── BadRequest        never retry: the request itself is wrong; names the field
├── Unauthenticated   never retry with this key: it is nobody's
├── BadModel          never serve this folder: the model is damaged or of a kind that we do not compute
├── Rejected          retry after `retry_after_s`, or elsewhere: we are full, draining or have no worker
├── TransferFailed    resend or recompute: KV bytes did not arrive whole
├── PeerRefused       never pair these two workers: they differ in `field`
├── WorkerLost        plan again on another worker
├── Unreachable       ask again, or another: a router or controller does not answer
├── CommandFailed     tell the user, who finds in the message what to look at, and end the command
├── RankLost          stop this process: a worker without one of its ranks is dead
└── InvariantBroken   a bug: stop this process; at the edge, where it concerns one request, that request

The edge (router/front/) maps the tree to HTTP and gRPC in one table.
"""

from __future__ import annotations

from enum import StrEnum


class TandemError(Exception):
    """Root of every error that Tandem raises on purpose."""


class BadRequest(TandemError):
    """The caller's request is wrong and will stay wrong.

    Args:
        field: path of the offending field, as the caller spelled it (`messages.0.content`).
        message: what is wrong with it, and what would be right.
        code: machine-readable kind, as OpenAI names it (`context_length_exceeded`), or None.
    """

    def __init__(self, field: str, message: str, code: str | None = None) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message
        self.code = code


class Unauthenticated(TandemError):
    """The caller sent no key where one is needed, or one that we do not know."""


class BadModel(TandemError):
    """A model's files are missing, damaged or of a kind that this engine does not compute; names file and field."""


class Unreachable(TandemError):
    """A router or a controller does not answer, or not to the end; names its address."""


class CommandFailed(TandemError):
    """What a command was to do cannot be done, or is not as it must be; says why, and where more is to be read."""


class RejectReason(StrEnum):
    """Why a request was turned away: one closed list for HTTP, gRPC, logs and metrics."""

    NO_WORKER = "no_worker"  # no READY worker of a needed role
    NO_ADAPTER = "no_adapter"  # READY workers, but none has the adapter that it names
    QUEUE_FULL = "queue_full"  # the router already holds its bound of requests
    QUEUE_TIMEOUT = "queue_timeout"  # waited its bound without a worker having room
    SHED = "shed"  # waited, and made room for one that goes first or whose tenant waits with less
    SLOW_FIRST_TOKEN = "slow_first_token"  # its first token is predicted later than the bound
    TENANT_CONCURRENCY = "tenant_concurrency"  # its tenant has as many open as it may
    TENANT_TOKENS = "tenant_tokens"  # its tenant has used the tokens of its rate
    TIMEOUT = "timeout"  # lived its bound without coming to an end
    DRAINING = "draining"  # this router is shutting down


class Rejected(TandemError):
    """We cannot serve the request now; the caller may retry after `retry_after_s` seconds."""

    def __init__(self, reason: RejectReason, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s


class TransferFailed(TandemError):
    """KV bytes did not arrive whole; the pages they were meant for count as dirty."""


class PeerRefused(TandemError):
    """Two workers must not exchange KV because they differ in `field`."""

    def __init__(self, field: str, ours: object, theirs: object) -> None:
        super().__init__(f"peer differs in {field}: ours {ours!r}, theirs {theirs!r}")
        self.field = field


class WorkerLost(TandemError):
    """A worker died, or its stream broke, while it held the request."""

    def __init__(self, worker_id: str, message: str) -> None:
        super().__init__(f"worker {worker_id} lost: {message}")
        self.worker_id = worker_id


class RankLost(TandemError):
    """A process that computes a part of this worker's model has ended or hangs."""


class InvariantBroken(TandemError):
    """A state that must not exist was reached: this process ends, or the request where it concerns no other."""
