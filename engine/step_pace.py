"""How long steps take, learnt from those that were computed, and what prompts may therefore add to decodes.

A prompt that shares a step with decodes delays all their streams. How much of it fits beside them depends on model,
machine and batch, so it is measured: the decodes' own time by a step without prompts, one for each size of batch now
and then, and the prompts' by what steps with them take longer.
"""

from __future__ import annotations

import sys
from typing import Final

OFF: Final = 1000.0  # and more: no bound. A number, as the schema of a chart's values knows no infinity
LEAST_TOKENS: Final = 8  # of a prompt in a step: with fewer, the step's fixed cost is most of it
WEIGHT: Final = 0.2  # of the newest sample
GOOD_FOR_STEPS: Final = 100  # contexts grow meanwhile


class StepPace:
    """max_slowdown: how many times longer than its decodes alone a step with prompts may take; from OFF on: any."""

    def __init__(self, max_slowdown: float) -> None:
        self._max_slowdown = max_slowdown
        self._num_steps = 0
        self._decodes: dict[int, tuple[float, int]] = {}  # by size of batch: seconds, and the step that told
        self._token_s = 0.0  # of a prompt; 0 until it is known

    def learn(self, duration_s: float, num_prompt_tokens: int, num_decodes: int) -> None:
        """A step was computed."""
        self._num_steps += 1
        size = _size(num_decodes)
        if not num_prompt_tokens:
            self._decodes[size] = (duration_s, self._num_steps)
        elif num_prompt_tokens >= LEAST_TOKENS:
            decodes_s, _step = self._decodes.get(size, (0.0, 0))
            sample = max(0.0, duration_s - decodes_s) / num_prompt_tokens
            self._token_s += (WEIGHT if self._token_s else 1.0) * (sample - self._token_s)

    def prompt_tokens_beside(self, num_decodes: int) -> int:
        """The most prompt tokens of a step with so many decodes; 0 where their own time is to be measured."""
        if not num_decodes or self._max_slowdown >= OFF:
            return sys.maxsize
        decodes_s, step = self._decodes.get(_size(num_decodes), (0.0, -GOOD_FOR_STEPS))
        if self._num_steps - step >= GOOD_FOR_STEPS:
            return 0
        if not self._token_s:
            return sys.maxsize
        return max(LEAST_TOKENS, int((self._max_slowdown - 1) * decodes_s / self._token_s))


def _size(num_decodes: int) -> int:
    """Batches of one size differ by less than a quarter."""
    shift = max(0, num_decodes.bit_length() - 3)
    return num_decodes >> shift << shift
