"""A small world of workers that hand KV to each other, on virtual time, with every fault a network and a process have.

Bytes are stamps: when a push's bytes arrive, each page they reach must be locked for that very hand-off, else the
world raises WriteIntoForeignBlock. Notices may be lost, doubled and late; pushes may be slow, fail, or arrive after
their source has died; workers freeze, die and come back as a new incarnation. One seed is one run.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from core.handoff import BlocksPushed, HandoffNotice, HandoffTicket, PushPrefix, Quiet, Renew, StopPushing
from core.identity import BlockHash
from core.membership import WorkerRef
from engine.block_pool import BlockPool
from kv_transfer.effects import Effect, LeaseConfig, Notify, Push, SourceEnded, TargetFailed, TargetLanded
from kv_transfer.session import HandoffSessions
from tests.simulation.locked_blocks import locked_blocks, no_bound

LEASE = LeaseConfig(lease_s=5.0, renew_s=1.0, settle_s=1.0, stop_retry_s=1.0, landed_timeout_s=5.0)
NUM_BLOCKS = 24


class WriteIntoForeignBlock(Exception):
    """Bytes reached a page that was not locked for their hand-off."""


@dataclass(frozen=True, slots=True)
class Faults:
    """Chances of each fault, and the most that anything is late, in seconds."""

    lose_notice: float = 0.1
    double_notice: float = 0.1
    fail_push: float = 0.05
    late_s: float = 2.0
    kill: float = 0.02
    freeze: float = 0.03
    cancel: float = 0.2
    strange_notice: float = 0.1


@dataclass(eq=False)
class Worker:
    """One incarnation: its pool, its sessions, and what the request level holds of its blocks."""

    ref: WorkerRef
    alive: bool = True
    frozen_until_s: float = 0.0
    pool: BlockPool = field(default_factory=lambda: BlockPool(NUM_BLOCKS))
    landed: dict[str, tuple[int, ...]] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    sources_ended: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.sessions = HandoffSessions(self.ref, self.pool, LEASE, self.pool.match, no_bound)


class World:
    """Three places for workers, a network between them, and a list of what is to happen."""

    def __init__(self, seed: int, faults: Faults) -> None:
        self.rng = random.Random(seed)
        self.faults = faults
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._lives = itertools.count(1)
        self.workers: dict[str, Worker] = {}
        self.everyone: list[Worker] = []
        for place in ("a", "b", "c"):
            self.start(place)
        self.tickets: list[HandoffTicket] = []
        self.num_landed = 0
        self.num_aborted = 0
        self._quiet_down = False

    # --- time ---

    def at(self, delay_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._order), what))

    def run(self, num_handoffs: int) -> None:
        """Start hand-offs at random moments, then let everything end."""
        for number in range(num_handoffs):
            self.at(self.rng.uniform(0, 20), lambda number=number: self.hand_off(f"h{number}"))
        for step in range(400):
            self.at(step * 0.25, self.tick)
        for _ in range(20):
            self.at(self.rng.uniform(0, 20), self.maybe_disturb)
        self.at(25.0, self.quiet_down)
        while self._events:
            self.now, _, what = heapq.heappop(self._events)
            what()
            for worker in self.workers.values():
                worker.pool.check()

    def check_over(self) -> None:
        for worker in self.workers.values():
            assert len(worker.sessions) == 0, f"hand-offs that never end on {worker.ref}"
            assert worker.pool.num_free == NUM_BLOCKS, f"blocks lost on {worker.ref}"

    def tick(self) -> None:
        for worker in self.workers.values():
            if not self.frozen(worker):
                self.perform(worker, worker.sessions.tick(self.now))

    def quiet_down(self) -> None:
        """No new faults from here on: what is under way must now end by itself."""
        self._quiet_down = True
        self.faults = Faults(0, 0, 0, 0.2, 0, 0, 0, 0)
        for worker in self.workers.values():
            worker.frozen_until_s = min(worker.frozen_until_s, self.now)

    # --- workers ---

    def start(self, place: str) -> None:
        worker = Worker(WorkerRef(place, str(next(self._lives))))
        self.workers[place] = worker
        self.everyone.append(worker)

    def frozen(self, worker: Worker) -> bool:
        return self.now < worker.frozen_until_s

    def maybe_disturb(self) -> None:
        worker = self.rng.choice(list(self.workers.values()))
        if self._quiet_down:
            return
        if self.rng.random() < self.faults.kill * 10:
            self.kill(worker)
        elif self.rng.random() < self.faults.freeze * 10:
            worker.frozen_until_s = self.now + self.rng.uniform(1, 15)

    def kill(self, worker: Worker) -> None:
        """The process ends; the others hear of it later, in any order; a new incarnation takes its place."""
        worker.alive = False
        self.start(worker.ref.worker_id)
        for other in self.everyone:
            if other.alive:
                self.at(self.rng.uniform(0, 3), lambda other=other: self.hear_of_death(other, worker.ref))

    def hear_of_death(self, worker: Worker, dead: WorkerRef) -> None:
        if not worker.alive:
            return
        if self.frozen(worker):
            self.at(worker.frozen_until_s - self.now + 0.1, lambda: self.hear_of_death(worker, dead))
            return
        self.perform(worker, worker.sessions.peer_dead(dead, self.now))

    # --- a hand-off, as router and roles would drive it ---

    def hand_off(self, handoff_id: str) -> None:
        source, target = self.rng.sample(list(self.workers.values()), 2)
        if self.frozen(source) or self.frozen(target):
            return
        if self.rng.random() < 0.2:
            self.fetch_prefix(handoff_id, source, target)
            return
        blocks = target.pool.allocate(self.rng.randrange(1, 6))
        if blocks is None:
            return
        first_block = self.rng.randrange(3)
        ticket = target.sessions.target.reserve(handoff_id, source.ref, first_block, tuple(blocks), self.now)
        self.tickets.append(ticket)
        if self.rng.random() >= self.faults.lose_notice:  # else the router died before it told the source
            self.at(self.rng.uniform(0, self.faults.late_s), lambda: self.open_source(source, ticket))
        if self.rng.random() < self.faults.cancel:
            delay_s = self.rng.uniform(0, 6)
            self.at(delay_s, lambda: self.cancel_target(target, handoff_id))
            self.at(delay_s + self.rng.uniform(0, 2), lambda: self.cancel_source(source, handoff_id))

    def open_source(self, source: Worker, ticket: HandoffTicket) -> None:
        if not source.alive or self.frozen(source):
            return
        self.perform(source, source.sessions.source.open(ticket, self.now))
        table: list[int] = []
        self.at(self.rng.uniform(0.1, 1), lambda: self.compute(source, ticket, table))

    def compute(self, source: Worker, ticket: HandoffTicket, table: list[int]) -> None:
        """One more chunk of the prompt; the request level holds its blocks until the last one is pushed."""
        num_wanted = ticket.first_block + len(ticket.block_ids)
        over = not source.alive or not source.sessions.source.is_open(ticket.handoff_id)
        fresh = None if over else source.pool.allocate(min(self.rng.randrange(1, 4), num_wanted - len(table)))
        if over or fresh is None:
            if source.alive:
                self.perform(source, source.sessions.source.cancel(ticket.handoff_id))
                source.pool.release(table)
            return
        if self.frozen(source):
            source.pool.release(fresh)
            delay_s = source.frozen_until_s - self.now + 0.1
            self.at(delay_s, lambda: self.compute(source, ticket, table))
            return
        table += fresh
        last = len(table) == num_wanted
        ready = source.sessions.source.blocks_ready(
            ticket.handoff_id, table, len(table), self.now, last=last, first_tokens=(7,) if last else ()
        )
        self.perform(source, ready)
        if last:
            source.pool.release(table)
        else:
            self.at(self.rng.uniform(0.1, 1), lambda: self.compute(source, ticket, table))

    def fetch_prefix(self, handoff_id: str, holder: Worker, target: Worker) -> None:
        """A prefix that the holder has cached, in part or not at all."""
        hashes = tuple(BlockHash(f"{handoff_id}/{index}".encode()) for index in range(4))
        cached = holder.pool.allocate(self.rng.randrange(5))
        if cached:
            for block, block_hash in zip(cached, hashes, strict=False):
                holder.pool.cache(block, block_hash)
            holder.pool.release(cached)
        pages = target.pool.allocate(len(hashes))
        if pages is None:
            return
        ticket = target.sessions.target.reserve(handoff_id, holder.ref, 0, tuple(pages), self.now, may_be_short=True)
        self.tickets.append(ticket)
        ask = HandoffNotice(handoff_id, ticket.generation, PushPrefix(hashes, ticket.block_ids))
        self.perform(target, [Notify(holder.ref, ask)])

    def cancel_target(self, target: Worker, handoff_id: str) -> None:
        if target.alive and not self.frozen(target):
            self.perform(target, target.sessions.target.cancel(handoff_id, "cancelled", self.now))

    def cancel_source(self, source: Worker, handoff_id: str) -> None:
        if source.alive and not self.frozen(source):
            self.perform(source, source.sessions.source.cancel(handoff_id))

    # --- effects ---

    def perform(self, worker: Worker, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Push():
                    self.push(worker, effect)
                case Notify(peer, notice):
                    self.send(worker.ref, peer, notice)
                case TargetLanded(handoff_id, blocks):
                    assert handoff_id not in worker.landed and handoff_id not in worker.failed
                    worker.landed[handoff_id] = blocks
                    self.num_landed += 1
                    self.at(self.rng.uniform(0, 3), lambda blocks=blocks: worker.pool.release(blocks))
                case TargetFailed(handoff_id):
                    assert handoff_id not in worker.landed and handoff_id not in worker.failed
                    worker.failed.add(handoff_id)
                    self.num_aborted += 1
                case SourceEnded(handoff_id):
                    assert handoff_id not in worker.sources_ended
                    worker.sources_ended.add(handoff_id)

    def push(self, source: Worker, push: Push) -> None:
        """Bytes arrive some time later, also from a source that has died within `settle_s`; then it settles."""
        assert isinstance(push.notice.body, BlocksPushed)
        delay_s = self.rng.uniform(0, self.faults.late_s)
        fails = self.rng.random() < self.faults.fail_push
        born_s = self.now
        sequence = push.notice.body.sequence

        def arrive() -> None:
            target = self.find(push.peer)
            died_long_ago = not source.alive and self.now > born_s + LEASE.settle_s
            written = target is not None and not died_long_ago
            if self.frozen(source) and source.alive:  # a frozen process writes when it thaws
                self.at(source.frozen_until_s - self.now + 0.01, arrive)
                return
            if written and target is not None:
                self.check_write(target, push)
            if source.alive:
                delivered = written and not fails
                self.perform(
                    source, source.sessions.source.push_settled(push.notice.handoff_id, sequence, delivered=delivered)
                )
                if delivered:
                    self.send(source.ref, push.peer, push.notice)

        # A dying source's bytes are at most `settle_s` under way: no later than that after its death.
        self.at(min(delay_s, LEASE.settle_s * 0.9), arrive)

    def check_write(self, target: Worker, push: Push) -> None:
        locked = locked_blocks(target.sessions.target, push.notice.handoff_id)
        if not set(push.target_blocks) <= set(locked):
            raise WriteIntoForeignBlock(
                f"t={self.now:.2f} {push.notice.handoff_id} wrote {push.target_blocks} of {target.ref}: "
                f"locked for it are {locked}"
            )

    def find(self, ref: WorkerRef) -> Worker | None:
        worker = self.workers[ref.worker_id]
        return worker if worker.ref == ref and worker.alive else None

    def send(self, sender: WorkerRef, receiver: WorkerRef, notice: HandoffNotice) -> None:
        copies = 0 if self.rng.random() < self.faults.lose_notice else 1
        copies += self.rng.random() < self.faults.double_notice
        for _ in range(copies):
            delay_s = self.rng.uniform(0, self.faults.late_s)
            self.at(delay_s, lambda: self.deliver(sender, receiver, notice))
        if self.tickets and self.rng.random() < self.faults.strange_notice:
            self.at(0.1, lambda: self.deliver(sender, receiver, self.strange_notice(notice)))

    def strange_notice(self, notice: HandoffNotice) -> HandoffNotice:
        """One that no honest peer would send now: a wrong generation, or about a hand-off that is not its own."""
        body = self.rng.choice(
            [Quiet("strange"), Renew(), StopPushing(), BlocksPushed(0, 0, 1, 1, 3), BlocksPushed(5, 9, 2)]
        )
        other = self.rng.choice(self.tickets)
        if self.rng.random() < 0.5:
            return HandoffNotice(notice.handoff_id, notice.generation + 1000, body)
        return HandoffNotice(other.handoff_id, other.generation + self.rng.randrange(100, 200), body)

    def deliver(self, sender: WorkerRef, receiver: WorkerRef, notice: HandoffNotice) -> None:
        worker = self.find(receiver)
        if worker is None:
            return
        if self.frozen(worker):
            self.at(worker.frozen_until_s - self.now + 0.01, lambda: self.deliver(sender, receiver, notice))
            return
        self.perform(worker, worker.sessions.notice(sender, notice, self.now))
