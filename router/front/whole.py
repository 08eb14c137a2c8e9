"""Outputs that are answered in one piece, and which of them are the best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from core.request import FinishReason, TokenLogprobs
from router.front.generation import TextDelta


@dataclass(slots=True)
class WholeOutput:
    """One choice, from its deltas."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def add(self, delta: TextDelta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason


def best_of(outputs: Sequence[WholeOutput], count: int) -> list[WholeOutput]:
    """The `count` outputs with the highest log probability a token, best first, of equals the earlier; all of them in
    their own order. They must be scored where some are left out."""
    if count == len(outputs):
        return list(outputs)
    return sorted(outputs, key=lambda output: -fmean(item.drawn for item in output.logprobs))[:count]
