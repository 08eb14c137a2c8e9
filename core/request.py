"""What a caller asks for, after the edge has checked it: plain values, no transport, no tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from core.errors import BadRequest

MAX_STOP_STRINGS: Final = 16
SEED_BITS: Final = 63


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"  # EOS, a stop id or a stop string
    LENGTH = "length"  # max_tokens or the context's end
    ABORT = "abort"  # cancelled by the client or by us
    ERROR = "error"  # failed after it had started; the message says why


class Placement(StrEnum):
    """Where a prompt is prefilled."""

    AUTO = "auto"  # the router decides
    REMOTE = "remote"  # on a prefill worker, with a KV hand-off
    LOCAL = "local"  # on the decode worker itself: aggregated


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn. temperature 0 is greedy and ignores the rest.

    The random number of a draw depends on (seed, position) alone, so a token does not depend on the
    batch, the worker, preemption or migration (DESIGN section 10).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and 0.0 <= self.temperature <= 2.0):
            raise BadRequest("temperature", f"must be a number in [0, 2], got {self.temperature}")
        if not (math.isfinite(self.top_p) and 0.0 < self.top_p <= 1.0):
            raise BadRequest("top_p", f"must be a number in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise BadRequest("top_k", f"must be 0 (no limit) or positive, got {self.top_k}")
        if not 0 <= self.seed < 1 << SEED_BITS:
            raise BadRequest("seed", f"must be in [0, 2**{SEED_BITS}), got {self.seed}")


@dataclass(frozen=True, slots=True)
class StopConditions:
    """When a generation ends. Until `min_tokens` are out, EOS and stop ids cannot be drawn and
    stop strings do not count."""

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise BadRequest("max_tokens", f"must be at least 1, got {self.max_tokens}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise BadRequest("min_tokens", f"must be in [0, max_tokens = {self.max_tokens}], got {self.min_tokens}")
        if len(self.stop_strings) > MAX_STOP_STRINGS:
            raise BadRequest("stop", f"at most {MAX_STOP_STRINGS} stop strings, got {len(self.stop_strings)}")
        if any(not text for text in self.stop_strings):
            raise BadRequest("stop", "a stop string must not be empty")


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One generation, as the router hands it to workers.

    `cache_salt` separates prefix caches: requests share cached blocks only when their salts are equal.
    `tenant` comes from authentication at the edge, never from a client's field.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: StopConditions
    cache_salt: str = ""
    tenant: str = ""

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise BadRequest("prompt", "must hold at least one token")

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """New tokens of one request. `position` is the index of the first of them in the output, so that
    whoever merges deltas from several workers emits each position exactly once."""

    request_id: str
    position: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    matched_stop: str | None = None  # the stop string that ended it
    message: str = ""  # why, when finish_reason is ERROR
    usage: WorkUsage | None = None  # with the first delta of a worker


@dataclass(frozen=True, slots=True)
class WorkUsage:
    """What one worker did for a request before its first delta: what tests and `explain` read to see
    that nothing was silently recomputed."""

    cached_tokens: int = 0  # prompt tokens found in this worker's own prefix cache
    fetched_tokens: int = 0  # prompt tokens pushed here by a holder of the shared prefix
    computed_tokens: int = 0  # prompt tokens this worker computed
    kv_blocks_received: int = 0
    kv_bytes_received: int = 0
