"""What is expected: of a request, its output; of the queue, how fast it is served."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Final

from core.messages import Turn
from core.request import GenerateRequest

FIRST_GUESS: Final = 256.0  # output tokens of a choice, of a tenant that has not shown any yet
OUTPUT_WEIGHT: Final = 0.1  # of the newest output
RATE_MEMORY_S: Final = 10.0  # older seconds count for a third, then a ninth
LEAST_SAMPLE_S: Final = 0.5
EXTRA_WEIGHT: Final = 0.1  # of the newest request
MOST_TENANTS: Final = 1024


class ExpectedCost:
    """Tokens that a request will take, prompt and output. Callers ask for far more output than they use, so it is
    what its tenant's outputs have been, within what is asked for."""

    def __init__(self) -> None:
        self._mean_output: dict[str, float] = {}  # of a choice, by tenant

    def of(self, request: GenerateRequest) -> int:
        expected = self._mean_output.get(request.tenant, FIRST_GUESS)
        return request.num_prompt_tokens + request.num_choices * math.ceil(min(expected, request.stop.max_tokens))

    def of_turn(self, turn: Turn) -> int:
        """Of one that another router serves; without its output, where none of its tenant's has ended here."""
        return turn.prompt_tokens + turn.num_choices * math.ceil(self._mean_output.get(turn.tenant, 0.0))

    def learn(self, tenant: str, output_tokens: int) -> None:
        """A choice of `tenant` has ended by itself."""
        known = self._mean_output.get(tenant, float(output_tokens))
        self._mean_output[tenant] = known + OUTPUT_WEIGHT * (output_tokens - known)


class Arrivals:
    """Tokens that each tenant asks for in a second, of late; of those who asked last."""

    def __init__(self) -> None:
        self._recent: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tokens, fading, and as of when

    def came(self, tenant: str, tokens: int, now: float) -> None:
        self._recent[tenant] = (self._faded(tenant, now) + tokens, now)
        self._recent.move_to_end(tenant)
        if len(self._recent) > MOST_TENANTS:
            self._recent.popitem(last=False)

    def tokens_per_s(self, now: float) -> dict[str, float]:
        return {tenant: self._faded(tenant, now) / RATE_MEMORY_S for tenant in self._recent}

    def _faded(self, tenant: str, now: float) -> float:
        tokens, at_s = self._recent.get(tenant, (0.0, now))
        return tokens * math.exp(-(now - at_s) / RATE_MEMORY_S)


class AfterTurn:
    """What first tokens take from their requests' turn on, beyond computing what is ahead: round trips, waits for KV
    blocks, steps shared with decodes."""

    def __init__(self) -> None:
        self.extra_s = 0.0
        self._turns: dict[str, tuple[float, float]] = {}  # when, and how long what was ahead should take

    def turn(self, request_id: str, ahead_s: float, now: float) -> None:
        self._turns[request_id] = (now, ahead_s)

    def first_token(self, request_id: str, own_s: float, now: float) -> None:
        """own_s: computing its own prompt. Only the first one since its turn counts."""
        if request_id in self._turns:
            turn_s, ahead_s = self._turns.pop(request_id)
            extra_s = max(0.0, now - turn_s - ahead_s - own_s)
            self.extra_s += EXTRA_WEIGHT * (extra_s - self.extra_s)

    def leave(self, request_id: str) -> None:
        self._turns.pop(request_id, None)


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
