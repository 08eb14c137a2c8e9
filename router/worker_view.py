"""What the router knows of one worker. No clock, no socket."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from core.membership import NOTHING_GIVEN, GivenWork, Life, WorkerInfo, WorkerLoad, WorkerRef
from core.messages import PeerConnected
from router.policy.affinity import place_key
from router.policy.pace import Pace
from router.policy.prefill_queue import PrefillQueue
from router.policy.topology import ASSUMED_GBPS, nearness, neighbourhood


@dataclass(slots=True, eq=False)
class WorkerView:
    """One incarnation. `open_tokens`: what this router has given it and not got back yet: newer than any report, so
    that a burst of requests does not all go to one worker. `others`: the same of all other routers, as the worker
    reports it. move_at_s: while it drains, when what still runs there is moved elsewhere.

    slot: a small number, nobody else's while it lives. heard_at_s: when it last reported.
    computing: of our prompts, those in its latest step; None: it does not say.
    prompt_tokens: left to compute, and kv_tokens: of open requests, whichever router gave them.
    links: gigabytes/s of the warm KV paths, by the peer's slot, assumed where no probe measured them; lanes: what each
    goes over.
    """

    info: WorkerInfo
    slot: int = 0
    life: Life = Life.STARTING
    load: WorkerLoad = field(default_factory=WorkerLoad)
    others: GivenWork = NOTHING_GIVEN
    heard_at_s: float = 0.0
    computing: frozenset[str] | None = None
    open_tokens: int = 0
    move_at_s: float = math.inf
    prefills: PrefillQueue = field(default_factory=PrefillQueue)
    pace: Pace = field(default_factory=Pace)
    prompt_tokens: int = 0
    kv_tokens: int = 0
    peers: dict[WorkerRef, PeerConnected] = field(default_factory=dict)
    links: dict[int, float] = field(default_factory=dict)
    lanes: dict[int, str] = field(default_factory=dict)
    linked: int = 0  # the same slots, as bits
    capacity_tokens: int = field(init=False)
    most_tokens: float = field(init=False)  # of a request that its pool could hold alone
    place_key: int = field(init=False)
    neighbourhood: str = field(init=False)

    def __post_init__(self) -> None:
        self.capacity_tokens = self.info.num_blocks * self.info.block_size
        self.most_tokens = math.inf if self.info.max_context_tokens <= self.capacity_tokens else self.capacity_tokens
        self.place_key = place_key(self.ref.worker_id)
        self.neighbourhood = neighbourhood(self.info)

    @property
    def ref(self) -> WorkerRef:
        return self.info.ref

    @property
    def is_idle(self) -> bool:
        """Nobody has given it anything that is open, and it holds no block."""
        load = self.load
        held = load.running_requests + load.waiting_requests + load.used_blocks + load.quarantined_blocks
        return not (held or self.open_tokens or self.others.num_requests)

    def link(self, peer: WorkerView, path: PeerConnected) -> None:
        gbps = path.probe_gbps if path.probe_gbps > 0.0 else ASSUMED_GBPS[nearness(self.info, peer.info)]
        self.links[peer.slot], self.lanes[peer.slot] = gbps, path.lane
        self.linked |= 1 << peer.slot

    def unlink(self, slot: int) -> None:
        self.links.pop(slot, None)
        self.lanes.pop(slot, None)
        self.linked &= ~(1 << slot)

    def weigh(self) -> None:
        """After each change of what it has to do."""
        self.prompt_tokens = self.prefills.num_tokens + self.others.prompt_tokens
        self.kv_tokens = self.open_tokens + self.others.num_tokens
