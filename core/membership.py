"""Who the workers are, and how each one's life goes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from core.errors import InvariantBroken
from core.identity import Adapter


class Role(StrEnum):
    """What a worker does. Without prefill workers (aggregated) decode workers compute prompts too."""

    PREFILL = "prefill"
    DECODE = "decode"


class Life(StrEnum):
    """STARTING: weights loading. READY: registered, warm. DRAINING: takes no new work, until it goes or serves again.
    GONE: dead to us."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    GONE = "gone"


LIFE_NEXT: Final[dict[Life, frozenset[Life]]] = {
    Life.STARTING: frozenset({Life.READY, Life.GONE}),
    Life.READY: frozenset({Life.DRAINING, Life.GONE}),
    Life.DRAINING: frozenset({Life.READY, Life.GONE}),
    Life.GONE: frozenset(),
}


def next_life(worker_id: str, state: Life, to: Life) -> Life:
    """`to`, when the table allows it; raises InvariantBroken otherwise."""
    if to not in LIFE_NEXT[state]:
        raise InvariantBroken(f"worker {worker_id}: {state} -> {to} is not in the table")
    return to


@dataclass(frozen=True, slots=True)
class WorkerRef:
    """One life of one worker. A restart on the same address is a new incarnation, hence another WorkerRef,
    and everything that names the old one is refused."""

    worker_id: str  # stable name of the place: "decode-0"
    incarnation: str  # random, made at start: "9f3a2c1d"

    def __str__(self) -> str:
        return f"{self.worker_id}@{self.incarnation}"

    @classmethod
    def parse(cls, text: str) -> WorkerRef:
        """The inverse of `str`. Raises: ValueError: there is no "@"."""
        worker_id, at, incarnation = text.rpartition("@")
        if not at:
            raise ValueError(f"not a worker's name: {text!r}")
        return cls(worker_id, incarnation)


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker says of itself when it registers."""

    ref: WorkerRef
    role: Role
    address: str  # host:port of its gRPC server
    identity_digest: bytes
    block_size: int
    block_bytes: int
    num_blocks: int
    max_context_tokens: int
    metrics_address: str = ""
    nvlink_domain: str = ""  # workers of one domain reach each other's GPUs by NVLink; empty: not known
    adapters: frozenset[Adapter] = frozenset()  # that it can add to the model for a request
    num_tier_blocks: int = 0  # that it can cache beside those of its pool


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What a worker says of its work, pushed with each step's message."""

    waiting_requests: int = 0
    running_requests: int = 0
    waiting_tokens: int = 0  # prompt tokens still to compute
    free_blocks: int = 0  # free or evictable
    used_blocks: int = 0  # held by requests or hand-offs
    quarantined_blocks: int = 0  # a write may still come: not usable


@dataclass(frozen=True, slots=True)
class GivenWork:
    """Requests that routers gave a worker, and that have not ended there."""

    num_requests: int = 0
    num_tokens: int = 0  # given with them: prompts, and output that was out already
    prompt_tokens: int = 0  # of these, of prompts that are computed here and have no first token yet
    unplaced_tokens: int = 0  # of these, of requests decoded here that have no KV blocks yet, as far as is known

    def __add__(self, other: GivenWork) -> GivenWork:
        return GivenWork(
            self.num_requests + other.num_requests,
            self.num_tokens + other.num_tokens,
            self.prompt_tokens + other.prompt_tokens,
            self.unplaced_tokens + other.unplaced_tokens,
        )

    def __sub__(self, other: GivenWork) -> GivenWork:
        return GivenWork(
            self.num_requests - other.num_requests,
            self.num_tokens - other.num_tokens,
            self.prompt_tokens - other.prompt_tokens,
            self.unplaced_tokens - other.unplaced_tokens,
        )


NOTHING_GIVEN: Final = GivenWork()
