"""What the router knows of its workers: who lives, how loaded each is, which pairs are warm. No clock, no socket."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from core.errors import BadRequest
from core.membership import NOTHING_GIVEN, GivenWork, Life, Role, WorkerInfo, WorkerLoad, WorkerRef, next_life
from core.messages import PeerConnected
from router.policy.decide import PrefillQueue


@dataclass(slots=True, eq=False)
class WorkerView:
    """One incarnation. `open_requests` and `open_tokens` are what this router has given it and not got back yet:
    newer than any report, so that a burst of requests does not all go to one worker. `others`: the same of all other
    routers, as the worker reports it. move_at_s: while it drains, when what still runs there is moved elsewhere."""

    info: WorkerInfo
    life: Life = Life.STARTING
    load: WorkerLoad = field(default_factory=WorkerLoad)
    others: GivenWork = NOTHING_GIVEN
    open_requests: int = 0
    open_tokens: int = 0
    move_at_s: float = math.inf
    prefills: PrefillQueue = field(default_factory=PrefillQueue)
    peers: dict[WorkerRef, PeerConnected] = field(default_factory=dict)

    @property
    def ref(self) -> WorkerRef:
        return self.info.ref

    @property
    def given_tokens(self) -> int:
        """Of all requests open on it, whichever router gave them."""
        return self.open_tokens + self.others.num_tokens


class ClusterView:
    """All workers that registered and that we have not lost, by incarnation."""

    def __init__(self) -> None:
        self._workers: dict[WorkerRef, WorkerView] = {}
        self._dead: set[WorkerRef] = set()

    def register(self, info: WorkerInfo) -> WorkerView:
        """Take up a worker, one that we lost too: it has cancelled all that we gave it.

        Raises: BadRequest: it serves another model or layout than the others, or is reported dead.
        """
        if info.ref in self._dead:
            raise BadRequest("worker.ref", f"incarnation {info.ref} is reported dead: start again as a new one")
        for other in self._workers.values():
            if other.info.identity_digest != info.identity_digest:
                raise BadRequest(
                    "worker.identity_digest", f"differs from that of {other.ref}: not the same model or KV"
                )
        worker = WorkerView(info)
        self._workers[info.ref] = worker
        return worker

    def get(self, ref: WorkerRef) -> WorkerView | None:
        return self._workers.get(ref)

    def ready(self, ref: WorkerRef) -> None:
        worker = self._workers[ref]
        worker.life = next_life(str(ref), worker.life, Life.READY)

    def draining(self, ref: WorkerRef, move_at_s: float = math.inf) -> None:
        """It takes nothing new. A worker that is not known to be READY is left as it is."""
        worker = self._workers.get(ref)
        if worker is None or worker.life not in (Life.READY, Life.DRAINING):
            return
        worker.move_at_s = min(worker.move_at_s, move_at_s)
        if worker.life is Life.READY:
            worker.life = next_life(str(ref), worker.life, Life.DRAINING)

    def serving(self, ref: WorkerRef, role: Role) -> None:
        """It takes work as `role`."""
        worker = self._workers.get(ref)
        if worker is None:
            return
        worker.info = replace(worker.info, role=role)
        worker.move_at_s = math.inf
        if worker.life is Life.DRAINING:
            worker.life = next_life(str(ref), worker.life, Life.READY)

    def lose(self, ref: WorkerRef) -> bool:
        """We do not reach this incarnation: nothing that we gave it is wanted any more. False: it was not known."""
        worker = self._workers.pop(ref, None)
        for other in self._workers.values():
            other.peers.pop(ref, None)
        return worker is not None

    def bury(self, ref: WorkerRef) -> None:
        """The process of this incarnation has ended: whoever calls itself so is refused from now on."""
        self._dead.add(ref)

    def connected(self, ref: WorkerRef, link: PeerConnected) -> None:
        """`ref` has a warm KV path to `link.peer`."""
        worker = self._workers.get(ref)
        if worker is not None and link.peer in self._workers:
            worker.peers[link.peer] = link

    def paired(self, one: WorkerRef, other: WorkerRef) -> bool:
        """Both can push to and notify each other."""
        first, second = self._workers.get(one), self._workers.get(other)
        return first is not None and second is not None and other in first.peers and one in second.peers

    def heard(self, ref: WorkerRef, load: WorkerLoad, others: GivenWork) -> None:
        """What a worker says of itself, and of what other routers have given it."""
        worker = self._workers.get(ref)
        if worker is not None:
            worker.load, worker.others = load, others
            worker.prefills.others_tokens = others.prompt_tokens

    def assign(self, ref: WorkerRef, num_tokens: int) -> None:
        worker = self._workers[ref]
        worker.open_requests += 1
        worker.open_tokens += num_tokens

    def unassign(self, ref: WorkerRef, num_tokens: int) -> None:
        """Take back an assignment; a worker that is gone took its own along."""
        worker = self._workers.get(ref)
        if worker is not None:
            worker.open_requests -= 1
            worker.open_tokens -= num_tokens

    def prefills(self, ref: WorkerRef) -> PrefillQueue:
        """The prompts under way on a worker; of one that is gone, an empty queue that nobody reads."""
        worker = self._workers.get(ref)
        return PrefillQueue() if worker is None else worker.prefills

    def workers(self, role: Role | None = None) -> list[WorkerView]:
        """In the order in which they registered."""
        return [worker for worker in self._workers.values() if role is None or worker.info.role is role]

    def has_ready(self, role: Role) -> bool:
        return any(worker.life is Life.READY for worker in self.workers(role))
