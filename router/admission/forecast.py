"""What is expected: of a request, its output; of the queue, how fast it is served."""

from __future__ import annotations

import math
from typing import Final

from core.request import GenerateRequest

FIRST_GUESS: Final = 256.0  # output tokens of a choice, of a tenant that has not shown any yet
OUTPUT_WEIGHT: Final = 0.1  # of the newest output
RATE_MEMORY_S: Final = 10.0  # older seconds count for a third, then a ninth
LEAST_SAMPLE_S: Final = 0.5


class ExpectedCost:
    """Tokens that a request will take, prompt and output. Callers ask for far more output than they use, so it is
    what its tenant's outputs have been, within what is asked for."""

    def __init__(self) -> None:
        self._mean_output: dict[str, float] = {}  # of a choice, by tenant

    def of(self, request: GenerateRequest) -> int:
        expected = self._mean_output.get(request.tenant, FIRST_GUESS)
        return request.num_prompt_tokens + request.num_choices * math.ceil(min(expected, request.stop.max_tokens))

    def learn(self, tenant: str, output_tokens: int) -> None:
        """A choice of `tenant` has ended by itself."""
        known = self._mean_output.get(tenant, float(output_tokens))
        self._mean_output[tenant] = known + OUTPUT_WEIGHT * (output_tokens - known)


class DrainRate:
    """Tokens that leave the queue in a second, while any wait in it: on average at first, then of late."""

    def __init__(self) -> None:
        self.tokens_per_s: float | None = None
        self._since_s: float | None = None  # None: nobody waits
        self._tokens = 0
        self._observed_s = 0.0

    def served(self, tokens: int, now: float) -> None:
        """`tokens` left the queue for the workers."""
        if self._since_s is None:
            return
        self._tokens += tokens
        lasted_s = now - self._since_s
        if lasted_s >= LEAST_SAMPLE_S:
            self._observed_s += lasted_s
            weight = max(lasted_s / self._observed_s, 1 - math.exp(-lasted_s / RATE_MEMORY_S))
            known = self.tokens_per_s or 0.0
            self.tokens_per_s = known + weight * (self._tokens / lasted_s - known)
            self._since_s, self._tokens = now, 0

    def waiting(self, now: float) -> None:
        """Someone waits from now on, if not already."""
        if self._since_s is None:
            self._since_s = now

    def emptied(self) -> None:
        """Nobody waits any more."""
        self._since_s, self._tokens = None, 0
