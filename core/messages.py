"""What router and workers say to each other over their one stream (proto/tandem/v1/worker.proto)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from core.handoff import HandoffTicket
from core.membership import NOTHING_GIVEN, GivenWork, Role, WorkerInfo, WorkerLoad, WorkerRef
from core.request import GenerateRequest, TokenDelta

# --- router to worker ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartGeneration:
    """To a decode worker: prefill and decode here."""

    request: GenerateRequest


@dataclass(frozen=True, slots=True)
class ReserveBlocks:
    """To a decode worker: take blocks, then answer Reserved or Refused. `source` will push."""

    request: GenerateRequest
    handoff_id: str
    source: WorkerRef


@dataclass(frozen=True, slots=True)
class StartPrefill:
    """To a prefill worker: compute, push to the ticket's pages, return the first token."""

    request: GenerateRequest
    ticket: HandoffTicket


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """Free what this request holds. Unknown requests are ignored."""

    request_id: str


@dataclass(frozen=True, slots=True)
class PeerJoined:
    """Connect to this worker before a request needs it."""

    worker: WorkerInfo


@dataclass(frozen=True, slots=True)
class PeerDead:
    """The process of this incarnation has ended: nothing more will come from it."""

    worker: WorkerRef


@dataclass(frozen=True, slots=True)
class ResyncCache:
    """Cache events were missed: say all that is cached again."""


Command = StartGeneration | ReserveBlocks | StartPrefill | CancelRequest | PeerJoined | PeerDead | ResyncCache


# --- worker to router ---------------------------------------------------------------------------------------------


class RefuseReason(StrEnum):
    """Why a worker will not go on with a request."""

    BAD_REQUEST = "bad_request"  # can never be served here; `message` says why
    NO_BLOCKS = "no_blocks"  # waited its bound without room in the KV pool
    TRANSFER_FAILED = "transfer_failed"  # the KV did not land
    DRAINING = "draining"  # takes nothing new
    WRONG_ROLE = "wrong_role"  # has changed its role since


@dataclass(frozen=True, slots=True)
class Reserved:
    request_id: str
    ticket: HandoffTicket


@dataclass(frozen=True, slots=True)
class Refused:
    """The request is over on this worker, which holds nothing of it that is not locked by a transfer."""

    request_id: str
    reason: RefuseReason
    message: str = ""


@dataclass(frozen=True, slots=True)
class CacheEvents:
    """Which blocks became findable on a worker, and which ceased to be: advice for routing.

    sequence: counts the events of one stream; after a gap what was said is no longer known to hold.
    reset: nothing said before holds; all that is cached follows, in this and in later events.
    stored, evicted: routing keys (core.identity.pack_keys) of blocks that are on the device now, or no longer; no key
        is in both. host, disk: of blocks that are now there, to be looked at after `evicted`, which has them too where
        they were elsewhere before: so a router of an earlier release, which knows no tiers, forgets them.
    """

    sequence: int
    stored: bytes
    evicted: bytes
    reset: bool = False
    host: bytes = b""
    disk: bytes = b""


@dataclass(frozen=True, slots=True)
class Turn:
    """A request had its turn at a router. batch: its priority is above 0."""

    tenant: str
    batch: bool
    num_choices: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one engine step drew, and how load and cache of the worker are after it; once a second when idle. `others`:
    what other routers than the one that is told have given the worker; `turns`: of these, what has begun since it was
    told. `cache`: None where it is as before.

    Of the prompts of the router that is told: `computing`, those in the latest step, said before it is computed, so
    that who ends a worker is known; None: a worker of an earlier release, which does not say. `in_line`: those that
    wait from now on, and do nothing until a step computes them.
    """

    deltas: tuple[TokenDelta, ...]
    load: WorkerLoad
    others: GivenWork = NOTHING_GIVEN
    cache: CacheEvents | None = None
    turns: tuple[Turn, ...] = ()
    computing: frozenset[str] | None = None
    in_line: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PeerConnected:
    """The KV path to a peer is warm; `lane` and `probe_gbps` as measured by a probe when it was connected."""

    peer: WorkerRef
    lane: str  # "shared-memory", "cuda-ipc", "rdma", "tcp-loopback", "tcp": where the probe's bytes really went
    probe_gbps: float  # gigabytes per second


@dataclass(frozen=True, slots=True)
class Draining:
    """Takes nothing new. What runs may go on for `finish_s`; of `unbegun` requests nothing is computed yet."""

    finish_s: float
    unbegun: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Serving:
    """Takes work as `role`: first on a stream, and when a drain has ended."""

    role: Role


Answer = StepOutput | Reserved | Refused | PeerConnected | Draining | Serving
