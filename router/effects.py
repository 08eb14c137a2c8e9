"""What the dispatcher wants done: frozen values, which router/live.py performs, in order."""

from __future__ import annotations

from dataclasses import dataclass

from core.errors import TandemError
from core.membership import WorkerRef
from core.messages import Command
from core.request import TokenDelta
from router.policy.choose import Plan


@dataclass(frozen=True, slots=True)
class Send:
    worker: WorkerRef
    command: Command


@dataclass(frozen=True, slots=True)
class Deliver:
    """The next positions of one choice's output. The last one of each choice has a finish reason, the last one of all
    ends the request. delta: of the request's own choice, under the id of the attempt that it came from."""

    request_id: str
    delta: TokenDelta
    last: bool = False


@dataclass(frozen=True, slots=True)
class Fail:
    """The request ends with this error."""

    request_id: str
    error: TandemError


@dataclass(frozen=True, slots=True)
class Planned:
    """Workers were chosen: for logs, metrics and traces. waited_s: since the request came. hedge: others go on
    with it too."""

    request_id: str
    attempt: int
    attempt_id: str
    plan: Plan
    waited_s: float
    hedge: bool = False


@dataclass(frozen=True, slots=True)
class RaceEnded:
    """Of two attempts at a request one has its first token. won: it is the hedge."""

    request_id: str
    won: bool


Effect = Send | Deliver | Fail | Planned | RaceEnded
