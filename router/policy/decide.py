"""Whether a remote prefill pays: what is left to prefill on both sides, at the pace that each side has shown.

A prefill worker that is free goes first: a prompt computed on a decode worker delays the streams there. But a rigid
split leaves the decode workers idle while prompts queue, so a prompt that would wait much longer remotely is computed
locally, in chunks beside the decodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

LEAST_TOKENS: Final = 32  # of fewer, the time tells of a step's fixed cost
WEIGHT: Final = 0.2  # of the newest sample


@dataclass(slots=True)
class PrefillQueue:
    """One worker's prompts under way, as its router knows them: in order of arrival, one after the other.

    num_tokens: of our prompts whose first token has not come. others_tokens: of other routers', as the worker says.
    seconds_per_token: learnt; None before the first sample.
    """

    num_tokens: int = 0
    others_tokens: int = 0
    seconds_per_token: float | None = None
    _free_at_s: float = 0.0

    def begin(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens

    def end(self, num_tokens: int) -> None:
        """A prompt is computed, or will not be."""
        self.num_tokens -= num_tokens

    def learn(self, begun_s: float, now: float, computed_tokens: int) -> None:
        """A prompt that was handed over at `begun_s` has its first token; of it `computed_tokens` were no hits."""
        sample = (now - max(begun_s, self._free_at_s)) / max(1, computed_tokens)
        self._free_at_s = now
        if computed_tokens >= LEAST_TOKENS:
            known = sample if self.seconds_per_token is None else self.seconds_per_token
            self.seconds_per_token = known + WEIGHT * (sample - known)


def remote_pays(prompt_tokens: int, remote: PrefillQueue, local: PrefillQueue, local_cost: float) -> bool:
    """local_cost: seconds of waiting for a prefill worker that one second of prefill on a decode worker is worth."""
    remote_pace = remote.seconds_per_token or local.seconds_per_token or 1.0
    local_pace = local.seconds_per_token or remote_pace
    remote_s = (remote.num_tokens + remote.others_tokens + prompt_tokens) * remote_pace
    local_s = (local.num_tokens + local.others_tokens + prompt_tokens) * local_pace
    return remote_s <= local_cost * local_s
