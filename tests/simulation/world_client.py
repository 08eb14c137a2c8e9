"""What a client of a simulated cluster sees, compared with its undisturbed run."""

from __future__ import annotations

from dataclasses import dataclass, field

from core.errors import TandemError
from core.request import FinishReason, GenerateRequest, TokenDelta
from router.admission.limits import Permit


class WrongStream(Exception):
    """A client saw what its undisturbed run does not hold, or saw it twice, late or never."""


@dataclass(eq=False)
class Client:
    """One request as its client sees it; outputs by choice."""

    request: GenerateRequest
    expected: list[list[int]]
    received: list[list[int]] = field(init=False)
    finishes: dict[int, FinishReason] = field(default_factory=dict)
    error: TandemError | None = None
    left: bool = False
    submitted_s: float = 0.0
    first_s: float = float("inf")
    last_s: float = float("inf")
    longest_gap_s: float = 0.0
    num_migrations: int = 0  # plans after tokens were out
    permit: Permit | None = None  # while its router holds it open

    def __post_init__(self) -> None:
        self.received = [[] for _ in self.expected]

    @property
    def num_received(self) -> int:
        return sum(map(len, self.received))

    @property
    def finished(self) -> bool:
        return len(self.finishes) == len(self.expected)

    @property
    def over(self) -> bool:
        return self.left or self.finished or self.error is not None

    def deliver(self, delta: TokenDelta, now: float) -> None:
        self.longest_gap_s = max(self.longest_gap_s, now - self.last_s)
        self.first_s = min(self.first_s, now)
        self.last_s = now
        received, expected = self.received[delta.choice], self.expected[delta.choice]
        at = len(received)
        if (self.over and not self.left) or delta.choice in self.finishes:
            raise WrongStream(f"{self.request.request_id}: more after the end: {delta}")
        if delta.position != at or list(delta.token_ids) != expected[at : at + len(delta.token_ids)]:
            raise WrongStream(f"{self.request.request_id}: got {delta}, expected {expected[at:]} from {at} on")
        received += delta.token_ids
        if delta.finish_reason is not None:
            self.finishes[delta.choice] = delta.finish_reason
            if len(received) != len(expected):
                raise WrongStream(f"{self.request.request_id}: ended after {len(received)} of {len(expected)}")

    def fail(self, error: TandemError) -> None:
        if self.over:
            raise WrongStream(f"{self.request.request_id}: a second end: {error}")
        self.error = error
