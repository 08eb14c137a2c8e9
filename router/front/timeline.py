"""When the moments of one request happened: TTFT and TPOT come from here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Timeline:
    """Monotonic seconds; None until it happened."""

    arrived_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None
    output_tokens: int = 0

    def tokens(self, count: int, now_s: float) -> None:
        """Note that `count` tokens went to the client at `now_s`."""
        if self.first_token_s is None:
            self.first_token_s = now_s
        self.last_token_s = now_s
        self.output_tokens += count

    @property
    def ttft_s(self) -> float | None:
        """Arrival to first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrived_s

    @property
    def tpot_s(self) -> float | None:
        """(last - first token time) / (output tokens - 1); None below two tokens."""
        if self.first_token_s is None or self.last_token_s is None or self.output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.output_tokens - 1)
