"""The prompts under way on one worker, and how long each keeps it busy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

LEAST_TOKENS: Final = 32  # of fewer, the time tells of a step's fixed cost


@dataclass(slots=True)
class PrefillQueue:
    """One worker's prompts under way, as its router knows them: in order of arrival, one after the other.

    num_tokens: of prompts whose first token has not come.
    """

    num_tokens: int = 0
    _free_at_s: float = 0.0

    def begin(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens

    def end(self, num_tokens: int) -> None:
        """A prompt is computed, or will not be."""
        self.num_tokens -= num_tokens

    def computed(self, begun_s: float, now: float, computed_tokens: int) -> float | None:
        """A prompt that was handed over at `begun_s` has its first token. Returns: as `so_far`."""
        shown = self.so_far(begun_s, now, computed_tokens)
        self._free_at_s = now
        return shown

    def so_far(self, begun_s: float, now: float, computed_tokens: int) -> float | None:
        """Seconds since its turn, for each token of it that is no hit; None: they are too few to tell."""
        if computed_tokens < LEAST_TOKENS:
            return None
        return (now - max(begun_s, self._free_at_s)) / computed_tokens
