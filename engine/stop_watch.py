"""Sees a stop string the moment a token completes it. The router's front searches the same text the same way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from core.request import StopConditions
from engine.stop import StopStrings


class TextDecoder(Protocol):
    """Turns tokens into text piece by piece (engine/tokenizer.py)."""

    def push(self, token_ids: Sequence[int]) -> str: ...


class TextStopWatch:
    """One request's output, searched for its stop strings. Text of the tokens before `min_tokens` is not searched."""

    def __init__(self, stop: StopConditions, decoder: TextDecoder) -> None:
        self._min_tokens = stop.min_tokens
        self._decoder = decoder
        self._strings = StopStrings(stop.stop_strings)
        self._num_tokens = 0

    def push(self, token_id: int) -> str | None:
        """The stop string that this token completes, or None."""
        text = self._decoder.push((token_id,))
        self._num_tokens += 1
        if self._num_tokens < self._min_tokens:
            return None
        return self._strings.push(text).matched
