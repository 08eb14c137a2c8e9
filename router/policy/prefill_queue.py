"""The prompts under way on one worker, and at what pace it computes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

LEAST_TOKENS: Final = 32  # of fewer, the time tells of a step's fixed cost
WEIGHT: Final = 0.2  # of the newest sample


@dataclass(slots=True)
class PrefillQueue:
    """One worker's prompts under way, as its router knows them: in order of arrival, one after the other.

    num_tokens: of prompts whose first token has not come. seconds_per_token: learnt; None before the first sample.
    """

    num_tokens: int = 0
    seconds_per_token: float | None = None
    _free_at_s: float = 0.0

    def begin(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens

    def end(self, num_tokens: int) -> None:
        """A prompt is computed, or will not be."""
        self.num_tokens -= num_tokens

    def learn(self, begun_s: float, now: float, computed_tokens: int) -> None:
        """A prompt that was handed over at `begun_s` has its first token; of it `computed_tokens` were no hits."""
        self._take(self._sample(begun_s, now, computed_tokens), computed_tokens)
        self._free_at_s = now

    def learn_outrun(self, begun_s: float, now: float, computed_tokens: int) -> None:
        """A prompt that was handed over at `begun_s` is wanted no longer, as another worker was faster: this one takes
        at least so long. Else a worker that loses every race would look as fast as ever."""
        sample = self._sample(begun_s, now, computed_tokens)
        if sample > (self.seconds_per_token or 0.0):
            self._take(sample, computed_tokens)

    def _sample(self, begun_s: float, now: float, computed_tokens: int) -> float:
        return (now - max(begun_s, self._free_at_s)) / max(1, computed_tokens)

    def _take(self, sample: float, computed_tokens: int) -> None:
        if computed_tokens >= LEAST_TOKENS:
            known = sample if self.seconds_per_token is None else self.seconds_per_token
            self.seconds_per_token = known + WEIGHT * (sample - known)
