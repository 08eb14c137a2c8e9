"""What the router knows of its workers: who lives, how loaded each is, what it caches, which pairs are warm. No clock,
no socket."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Final

from core.errors import BadRequest
from core.identity import Adapter
from core.membership import GivenWork, Life, Role, WorkerInfo, WorkerLoad, WorkerRef, next_life
from core.messages import CacheEvents, PeerConnected
from router.policy.pace import Paces
from router.policy.transfer import ExposedShares
from router.prefix_view import PrefixView
from router.worker_view import WorkerView

MOST_DEAD: Final = 65_536  # about 15 MB; more than 60 deaths of each worker that a router takes


@dataclass(frozen=True, slots=True)
class _Ready:
    """READY workers, listed once for all requests until one of them changes."""

    workers: dict[Role, list[WorkerView]]
    slots: dict[Role, int]
    paired_decodes: list[WorkerView]
    least_tokens: float  # that any decode worker's pool could hold of one request
    prefills_near: dict[str, list[WorkerView]]  # by neighbourhood


class ClusterView:
    """All workers that registered and that we have not lost, by incarnation."""

    def __init__(self) -> None:
        self._workers: dict[WorkerRef, WorkerView] = {}
        self._dead: dict[WorkerRef, None] = {}  # the latest reported, or refused, last
        self._slots: dict[int, WorkerView] = {}
        self._ready: _Ready | None = None  # None: to be listed again, as a life or a path changed
        self._changed_at_s = -math.inf  # when one last came or went
        self.prefixes = PrefixView()
        self.exposed = ExposedShares()
        self.paces = Paces()

    def register(self, info: WorkerInfo, now: float) -> WorkerView:
        """Take up a worker, one that we lost too: it has cancelled all that we gave it.

        Raises: BadRequest: it serves another model or layout than the others, or is reported dead.
        """
        if info.ref in self._dead:
            self.bury(info.ref)
            raise BadRequest("worker.ref", f"incarnation {info.ref} is reported dead: start again as a new one")
        for other in self._workers.values():
            if other.info.identity_digest != info.identity_digest:
                raise BadRequest(
                    "worker.identity_digest", f"differs from that of {other.ref}: not the same model or KV"
                )
        slot = next(slot for slot in itertools.count() if slot not in self._slots)
        worker = WorkerView(info, slot, heard_at_s=now)
        self._workers[info.ref] = self._slots[slot] = worker
        self._changed_at_s = now
        self.prefixes.join(slot, info.num_blocks + info.num_tier_blocks)
        return worker

    def get(self, ref: WorkerRef) -> WorkerView | None:
        return self._workers.get(ref)

    def at(self, slot: int) -> WorkerView:
        return self._slots[slot]

    def ready(self, ref: WorkerRef) -> None:
        worker = self._workers[ref]
        worker.life = next_life(str(ref), worker.life, Life.READY)
        self._ready = None

    def draining(self, ref: WorkerRef, move_at_s: float = math.inf) -> None:
        """It takes nothing new. A worker that is not known to be READY is left as it is."""
        worker = self._workers.get(ref)
        if worker is None or worker.life not in (Life.READY, Life.DRAINING):
            return
        worker.move_at_s = min(worker.move_at_s, move_at_s)
        if worker.life is Life.READY:
            worker.life = next_life(str(ref), worker.life, Life.DRAINING)
            self._ready = None

    def serving(self, ref: WorkerRef, role: Role) -> None:
        """It takes work as `role`."""
        worker = self._workers.get(ref)
        if worker is None:
            return
        worker.info = replace(worker.info, role=role)
        worker.move_at_s = math.inf
        if worker.life is Life.DRAINING:
            worker.life = next_life(str(ref), worker.life, Life.READY)
        self._ready = None

    def lose(self, ref: WorkerRef, now: float) -> bool:
        """We do not reach this incarnation: nothing that we gave it is wanted any more. False: it was not known."""
        worker = self._workers.pop(ref, None)
        if worker is None:
            return False
        self._changed_at_s = now
        del self._slots[worker.slot]
        self.prefixes.leave(worker.slot)
        self._ready = None
        for other in self._workers.values():
            other.peers.pop(ref, None)
            other.unlink(worker.slot)
        return True

    def bury(self, ref: WorkerRef) -> None:
        """The process of this incarnation has ended: whoever calls itself so is refused from now on.

        A worker that lives all the same announces itself every second, which each time makes it the latest again. So
        the one that is forgotten after MOST_DEAD others was silent while all of these died.
        """
        self._dead.pop(ref, None)
        self._dead[ref] = None
        if len(self._dead) > MOST_DEAD:
            del self._dead[next(iter(self._dead))]

    def heard(self, ref: WorkerRef, load: WorkerLoad, others: GivenWork, now: float) -> None:
        """What a worker says of itself, and of what other routers have given it."""
        worker = self._workers.get(ref)
        if worker is not None:
            worker.load, worker.others, worker.heard_at_s = load, others, now
            worker.weigh()

    def computes(self, ref: WorkerRef, prompts: frozenset[str] | None) -> None:
        """Which of our prompts are in a worker's latest step, as it says."""
        worker = self._workers.get(ref)
        if worker is not None:
            worker.computing = prompts

    def heard_cache(self, ref: WorkerRef, events: CacheEvents | None, now: float) -> bool:
        """What a worker says that it caches; None: as before. True: ask it for a snapshot."""
        worker = self._workers.get(ref)
        return worker is not None and self.prefixes.hear(worker.slot, events, now)

    def connected(self, ref: WorkerRef, link: PeerConnected) -> None:
        """`ref` has a warm KV path to `link.peer`."""
        worker, peer = self._workers.get(ref), self._workers.get(link.peer)
        if worker is None or peer is None:
            return
        worker.peers[link.peer] = link
        if ref in peer.peers:  # both can push to and notify each other
            worker.link(peer, link)
            peer.link(worker, peer.peers[ref])
            self._ready = None

    def assign(self, ref: WorkerRef, num_tokens: int) -> None:
        worker = self._workers[ref]
        worker.open_tokens += num_tokens
        worker.weigh()

    def unassign(self, ref: WorkerRef, num_tokens: int) -> None:
        """Take back an assignment; a worker that is gone took its own along."""
        worker = self._workers.get(ref)
        if worker is not None:
            worker.open_tokens -= num_tokens
            worker.weigh()

    def begin_prefill(self, ref: WorkerRef, num_tokens: int) -> None:
        """A prompt of which a worker has to compute so many tokens is on its way there."""
        worker = self._workers[ref]
        worker.prefills.begin(num_tokens)
        worker.weigh()

    def end_prefill(self, ref: WorkerRef, num_tokens: int) -> None:
        """A prompt is computed, or will not be; a worker that is gone took its own along."""
        worker = self._workers.get(ref)
        if worker is not None:
            worker.prefills.end(num_tokens)
            worker.weigh()

    def learn_pace(self, ref: WorkerRef, begun_s: float, now: float, computed_tokens: int) -> None:
        """A prompt that a worker got at `begun_s` has its first token; of it `computed_tokens` were no hits."""
        worker = self._workers.get(ref)
        if worker is not None and (sample := worker.prefills.computed(begun_s, now, computed_tokens)) is not None:
            self.paces.learn(worker.pace, worker.info.role, sample, now)

    def learn_outrun(self, ref: WorkerRef, begun_s: float, now: float, computed_tokens: int) -> None:
        """A prompt is wanted no longer, as another worker was faster: this one takes at least so long. Else one that
        loses every race would look as fast as ever."""
        worker = self._workers.get(ref)
        if worker is not None and (sample := worker.prefills.so_far(begun_s, now, computed_tokens)) is not None:
            self.paces.learn_at_least(worker.pace, worker.info.role, sample, now)

    def learn_transfer(
        self, decode: WorkerRef, prefill: WorkerRef, kv_bytes: int, exposed_s: float, now: float
    ) -> None:
        """A hand-off from `prefill` to `decode` has ended; exposed_s: what its request waited for it."""
        source, target = self._workers.get(prefill), self._workers.get(decode)
        if source is not None and target is not None and source.slot in target.links:
            taken_s = kv_bytes / 1e9 / target.links[source.slot]
            self.exposed.learn(target.lanes[source.slot], taken_s, exposed_s, now)

    def workers(self, role: Role | None = None) -> list[WorkerView]:
        """In the order in which they registered."""
        return [worker for worker in self._workers.values() if role is None or worker.info.role is role]

    def ready_workers(self, role: Role) -> list[WorkerView]:
        """In the order in which they registered. Not to be changed."""
        return self._listed().workers[role]

    def ready_slots(self, role: Role) -> int:
        """The same, as bits."""
        return self._listed().slots[role]

    def ready_decodes_paired(self) -> list[WorkerView]:
        """Those with a warm path to and from a ready prefill worker."""
        return self._listed().paired_decodes

    def ready_decodes_hold(self, num_tokens: int) -> bool:
        """Each of them a request of so many tokens."""
        return num_tokens <= self._listed().least_tokens

    def ready_prefills_near(self, neighbourhood: str) -> list[WorkerView]:
        """In the order in which they registered."""
        return self._listed().prefills_near.get(neighbourhood, [])

    def _listed(self) -> _Ready:
        if self._ready is None:
            ready = [worker for worker in self._workers.values() if worker.life is Life.READY]
            workers = {role: [worker for worker in ready if worker.info.role is role] for role in Role}
            slots = {role: sum(1 << worker.slot for worker in workers[role]) for role in Role}
            paired = [worker for worker in workers[Role.DECODE] if worker.linked & slots[Role.PREFILL]]
            near: dict[str, list[WorkerView]] = {}
            for worker in workers[Role.PREFILL]:
                near.setdefault(worker.neighbourhood, []).append(worker)
            least = min((worker.most_tokens for worker in workers[Role.DECODE]), default=0.0)
            self._ready = _Ready(workers, slots, paired, least, near)
        return self._ready

    def nobody_has(self, adapter: Adapter, since_s: float) -> bool:
        """Workers serve, none that we know has it, and none has come or gone since then, who might have or get it."""
        if self._changed_at_s >= since_s or not self.has_ready(Role.DECODE):
            return False
        return all(adapter not in worker.info.adapters for worker in self._workers.values())

    def has_ready(self, role: Role) -> bool:
        return bool(self.ready_workers(role))
