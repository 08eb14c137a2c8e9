"""One worker of tests/simulation/cluster_world.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from cluster.worker.role import WorkerRole
from cluster.worker.router_streams import RouterStreams
from core.handoff import BlocksPushed, HandoffNotice
from core.identity import BlockHash
from core.membership import GivenWork, Role, WorkerRef
from core.messages import (
    CancelRequest,
    Command,
    PeerConnected,
    PeerDead,
    PeerJoined,
    Refused,
    RefuseReason,
    ReserveBlocks,
    Reserved,
    ResyncCache,
    StartGeneration,
    StartPrefill,
)
from core.request import GenerateRequest, TokenDelta
from decode_worker.session import DecodeConfig, DecodeSession
from engine.block_pool import BlockPool
from engine.scheduler import Scheduler
from engine.scheduler_config import SchedulerConfig
from engine.step import Drawn, StepPlan
from kv_transfer.effects import (
    LeaseConfig,
    LoadFailurePolicy,
    Notify,
    Push,
    SourceEnded,
    TargetFailed,
    TargetLanded,
)
from kv_transfer.session import HandoffSessions
from prefill_worker.session import LookUpPrefix, PrefillConfig, PrefillSession
from tests.engine.token_tiers import TokenTiers
from tests.simulation.chained_kv import ADAPTER, BLOCK_SIZE, LIMITS, ChainMemory, WriteIntoForeignBlock
from tests.simulation.locked_blocks import locked_blocks, no_bound
from tests.worker_info import worker_info

if TYPE_CHECKING:
    from tests.simulation.cluster_world import World
    from tests.simulation.world_router import Link

LEASE = LeaseConfig(lease_s=5.0, renew_s=1.0, settle_s=1.0, stop_retry_s=1.0, landed_timeout_s=5.0)


ROUTER_SILENCE_S = 5.0
UNWANTED_S = 1.0  # a step that is under way when a request is cancelled ends first


class WorkForNobody(Exception):
    """A worker goes on with a request whose router is gone."""


class Host:
    """One incarnation of a worker: stands in for cluster/worker/process.py, the role services and the driver."""

    def __init__(self, world: World, ref: WorkerRef, role: Role) -> None:
        self.world = world
        self.ref = ref
        self.alive = True
        self.frozen = False
        self._on_thaw: list[Callable[[], None]] = []
        self.tiers = TokenTiers(*world.tiers)
        self.tiers.decisions.on_work = self.drive_disk
        self.tiers.copies_per_step = world.tier_rng.choice([1, 3, 1000])
        self.disk_is_busy = False
        self.pool = BlockPool(world.num_blocks, self.tiers.decisions)
        self.memory = self.tiers.memory = ChainMemory(self.pool, world.salts.__getitem__)
        budget = world.rng.choice([8, 16, 64])
        self.scheduler = Scheduler(SchedulerConfig(budget, 16), self.pool, LIMITS, b"id", _no_watch, adapters=[ADAPTER])
        policy = world.rng.choice(list(LoadFailurePolicy))
        self.handoffs = HandoffSessions(ref, self.pool, LEASE, self.pool.match, no_bound, policy)
        self.streams = RouterStreams(self.pool, self.scheduler.holds)
        self.role = WorkerRole(role, self.make_session, self.streams.send, self.scheduler, self.handoffs)
        self.info = worker_info(
            ref,
            role,
            block_size=BLOCK_SIZE,
            num_blocks=world.num_blocks,
            adapters=frozenset({ADAPTER}),
            num_tier_blocks=sum(world.tiers),
        )
        self.links: dict[Link, float] = {}  # and when its router was heard
        self.peers: dict[WorkerRef, None] = {}  # known and not dead
        self.connected: dict[WorkerRef, None] = {}
        self.stepping = False
        self.slowness = 1.0
        self.step_s = 0.0  # of the latest step
        self.say_at_s = 0.0
        self.unwanted_since_s: dict[str, float] = {}  # by request id

    def make_session(self, role: Role) -> PrefillSession | DecodeSession:
        if role is Role.PREFILL:
            return PrefillSession(PrefillConfig(1, min_fetch_blocks=2), self.scheduler, self.handoffs)
        return DecodeSession(DecodeConfig(1, reserve_timeout_s=8.0), self.scheduler, self.handoffs)

    # --- drain and role ---

    @property
    def session(self) -> PrefillSession | DecodeSession:
        return self.role.service

    def drain(self, finish_s: float, timeout_s: float, to: Role | None, then: Callable[[str], None]) -> None:
        """`then` hears, in this process, what came of it."""
        drain = self.role.drain(timeout_s, finish_s, self.world.now, to)

        def look() -> None:
            self.role.poll(self.world.now)
            if drain.outcome is None:
                self.world.at(0.05, lambda: self.do(look))
                return
            self.info = replace(self.info, role=self.role.role)
            then(drain.outcome)

        look()

    def do(self, what: Callable[[], object]) -> None:
        """Run in this process, now or, in order, when it thaws; never when it is dead."""
        if not self.alive:
            return
        if self.frozen:
            self._on_thaw.append(lambda: self.do(what))
            return
        what()
        self.wake()
        self.flush()

    def slow_down(self, slowness: float, duration_s: float) -> None:
        """Each of its steps takes so many times as long, for a while."""
        self.slowness = slowness
        self.world.at(duration_s, lambda: setattr(self, "slowness", 1.0))

    def thaw(self) -> None:
        self.frozen = False
        self.unwanted_since_s.clear()  # it had no time to see to that
        waiting, self._on_thaw = self._on_thaw, []
        for what in waiting:
            what()

    def left(self) -> dict[str, object]:
        """What is held or known although no request is open."""
        tables = [
            name
            for owner in (self.session, self.scheduler)
            for name in ("_prefills", "_request_of", "_waiting", "_awaiting_room", "_reserved", "_handoff_of",
                         "_landed_blocks", "_sequences", "_running")
            if getattr(owner, name, None)
        ]  # fmt: skip
        found = {
            "used": self.pool.num_used,
            "quarantined": self.pool.num_quarantined,
            "handoffs": len(self.handoffs),
            "tables": tables,
            "owners": dict(self.streams._owner),
            "requests": [name for stream in self.streams._streams for name in stream.requests],
            "given": [work for work in (self.streams._work,) if work != GivenWork()],
        }
        return {name: value for name, value in found.items() if value}

    # --- routers ---

    def router_opened(self, link: Link) -> None:
        link.stream, orphans = self.streams.open(link.router.router_id)
        self.links[link] = self.world.now
        self.cancel(orphans)
        self.streams.send(self.role.state(self.world.now))
        self.say(())

    def router_closed(self, link: Link) -> None:
        if link in self.links:
            del self.links[link]
            assert link.stream is not None
            self.cancel(self.streams.close(link.stream))

    def cancel(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.perform(self.session.cancel(request_id, self.world.now))

    def flush(self) -> None:
        for link in self.links:
            while link.stream is not None and not link.stream.outbox.empty():
                answer = link.stream.outbox.get_nowait()
                if answer is not None:
                    link.answer(answer)

    def heard(self, link: Link) -> bool:
        """False: its router was silent for too long, and does not know it yet."""
        if link in self.links:
            self.links[link] = self.world.now
        return link in self.links

    def command(self, link: Link, command: Command) -> None:
        now, session = self.world.now, self.session
        if not self.heard(link):
            return
        if isinstance(command, StartGeneration | ReserveBlocks | StartPrefill):
            assert link.stream is not None
            self.streams.own(link.stream, command)
            reason = RefuseReason.DRAINING if self.role.draining else RefuseReason.WRONG_ROLE
            if self.role.draining or isinstance(command, StartPrefill) is not isinstance(session, PrefillSession):
                self.world.refused[reason] += 1
                self.streams.send(Refused(command.request.request_id, reason))
                return
        match command:
            case PeerJoined(worker):
                self.peers[worker.ref] = None
                self.connect(worker.ref)
            case PeerDead(ref):
                self.peers.pop(ref, None)
                self.connected.pop(ref, None)
                self.perform(self.handoffs.peer_dead(ref, now))
                for holders in self.world.index.values():
                    holders.pop(ref, None)
            case ResyncCache():
                assert link.stream is not None
                link.stream.feed.begin_again()
                self.say(())
            case CancelRequest(request_id):
                self.perform(session.cancel(request_id, now))
                self.streams.disown(request_id)
            case StartGeneration(request):
                assert isinstance(session, DecodeSession)
                self.perform(session.start(request))
            case ReserveBlocks(request, handoff_id, source):
                assert isinstance(session, DecodeSession)
                self.perform(session.reserve(request, handoff_id, source, now))
            case StartPrefill(request, ticket):
                assert isinstance(session, PrefillSession)
                self.perform(session.start(request, ticket, now))

    # --- peers ---

    def connect(self, ref: WorkerRef) -> None:
        """Handshake until it works or the peer is dead; a path that is there is said again."""

        def attempt() -> None:
            if ref not in self.peers:
                return
            if self.find(ref) is None:
                self.world.at(0.5, lambda: self.do(attempt))
                return
            self.connected[ref] = None
            self.streams.send(PeerConnected(ref, "in-process", 1.0))

        if ref in self.connected:
            self.streams.send(PeerConnected(ref, "in-process", 1.0))
        else:
            self.world.at(self.world.late(), lambda: self.do(attempt))

    def peer_lost(self, ref: WorkerRef) -> None:
        self.perform(self.handoffs.peer_lost(ref, self.world.now))
        if ref in self.connected:
            del self.connected[ref]
            self.connect(ref)

    def find(self, ref: WorkerRef) -> Host | None:
        host = self.world.hosts[ref.worker_id]
        return host if host.ref == ref and host.alive else None

    # --- the disk ---

    def drive_disk(self) -> None:
        """One operation at a time; now and then it forgets, and sometimes it fails for good."""
        rng = self.world.tier_rng
        if self.disk_is_busy or not self.tiers.io():
            return
        self.disk_is_busy = True
        if rng.random() < 0.1:
            self.tiers.rot(rng)
        fails = rng.random() < 0.002

        def end() -> None:
            if fails:
                self.tiers.decisions.lose_disk()
            else:
                self.tiers.io()
                self.disk_is_busy = False
                self.drive_disk()
            self.perform(self.session.tick(self.world.now))

        self.world.at(rng.uniform(0, 0.1), lambda: self.do(end))

    # --- steps and time ---

    def wake(self) -> None:
        if self.stepping or (plan := self.scheduler.plan()) is None:
            return
        self.stepping = True
        self.streams.computes(plan.prompts, self.scheduler.load)
        duration_s = self.step_s = self.world.step_s(plan) * self.slowness
        drawn: list[tuple[Drawn, ...]] = []
        self.world.at(duration_s / 2, lambda: self.do(lambda: drawn.extend(self.compute(plan))))
        self.world.at(duration_s, lambda: self.do(lambda: self.stepped(plan, drawn)))

    def compute(self, plan: StepPlan) -> list[tuple[Drawn, ...]]:
        for item in plan.slices:
            unowned = [block for block in item.block_table if self.pool._references[block] == 0]
            if unowned:
                raise WriteIntoForeignBlock(f"step of {item.request_id} on {self.ref}: {unowned} are not used")
        return self.memory.run(plan)

    def stepped(self, plan: StepPlan, drawn: list[tuple[Drawn, ...]]) -> None:
        progress = self.scheduler.commit(plan, drawn)
        self.stepping = False
        if isinstance(self.session, PrefillSession):
            deltas, effects = self.session.progressed(progress, self.world.now)
            self.perform(effects)
        else:
            deltas = self.session.progressed(progress)
            self.perform(self.session.serve_waiting(self.world.now))
        self.say(deltas)
        for item in progress:
            if item.ended:
                self.streams.disown(item.request_id)

    def say(self, deltas: Iterable[TokenDelta]) -> None:
        changes = self.pool.moves.take()
        self.streams.step(deltas, self.scheduler.load(), changes)
        index, rng = self.world.index, self.world.rng

        def write() -> None:
            for block_hash in changes.stored:
                index.setdefault(block_hash, {})[self.ref] = None
            for block_hash in changes.evicted:
                index.get(block_hash, {}).pop(self.ref, None)

        if (changes.stored or changes.evicted) and rng.random() >= self.world.faults.index_away:
            self.world.at(self.world.late(), write)

    def check_wanted(self) -> None:
        """Nothing is computed or reserved for long that no router waits for."""
        known = [*self.scheduler._sequences, *getattr(self.session, "_handoff_of", ())]
        unwanted = [request_id for request_id in known if not self.streams.owns(request_id)]
        if self.role.role is Role.DECODE:  # a prefill worker may not have heard yet that its KV has landed
            unwanted += [request_id for link in self.links for request_id in link.unwanted() if request_id in known]
        self.unwanted_since_s = {name: self.unwanted_since_s.get(name, self.world.now) for name in unwanted}
        for request_id, since_s in self.unwanted_since_s.items():
            if self.world.now - since_s > UNWANTED_S + self.step_s:
                raise WorkForNobody(f"t={self.world.now:.2f} {self.ref}: {request_id}")

    def tick(self) -> None:
        self.check_wanted()
        now = self.world.now
        for link, heard_at_s in list(self.links.items()):
            if now - heard_at_s > ROUTER_SILENCE_S:
                self.router_closed(link)
                link.closed_by_host()
        self.perform(self.handoffs.tick(now))
        self.perform(self.session.tick(now))
        if now < self.say_at_s:
            if self.streams.behind or self.pool.moves.any:
                self.say(())
            return
        self.say_at_s = now + 1.0
        self.say(())
        for router in self.world.routers:
            if router is not None and not router.announce(self, self.scheduler.load()):
                self.world.kill(self)

    # --- effects ---

    def perform(self, effects: Iterable[object]) -> None:
        for effect in effects:
            match effect:
                case Push():
                    self.push(effect)
                case Notify(peer, notice):
                    self.notify(peer, notice)
                case Reserved() | Refused():
                    self.streams.send(effect)
                case LookUpPrefix(request_id, block_hashes):
                    self.look_up(request_id, block_hashes)
                case TargetLanded():
                    self.perform(self.session.landed(effect))
                case TargetFailed():
                    self.perform(self.session.failed(effect))
                case SourceEnded():
                    if isinstance(self.session, PrefillSession):
                        self.perform(self.session.source_ended(effect, self.world.now))

    def look_up(self, request_id: str, block_hashes: tuple[BlockHash, ...]) -> None:
        session = self.session
        assert isinstance(session, PrefillSession)

        def answer() -> None:
            num_blocks, holder = 0, None
            if self.world.rng.random() >= self.world.faults.index_away:
                num_blocks, holder = self.longest_run(block_hashes)
            self.perform(session.prefix_found(request_id, num_blocks, holder, self.world.now))

        self.world.at(self.world.late(), lambda: self.do(answer))

    def longest_run(self, block_hashes: tuple[BlockHash, ...]) -> tuple[int, WorkerRef | None]:
        best: tuple[int, WorkerRef | None] = (0, None)
        for ref in self.connected:
            held = (ref in self.world.index.get(block_hash, {}) for block_hash in block_hashes)
            num_blocks = sum(1 for _ in itertools.takewhile(bool, held))
            best = max(best, (num_blocks, ref), key=lambda item: item[0])
        return best

    def push(self, push: Push) -> None:
        """Bytes arrive some time later, from a source that has died within `settle_s`; then the push settles."""
        assert isinstance(push.notice.body, BlocksPushed)
        world, sequence, handoff_id = self.world, push.notice.body.sequence, push.notice.handoff_id
        fails = push.peer not in self.connected or world.rng.random() < world.faults.fail_push
        corrupt = bool(push.source_blocks) and world.rng.random() < world.faults.corrupt_block
        bad = world.rng.randrange(len(push.source_blocks)) if corrupt else len(push.source_blocks)
        born_s = world.now

        def settle(delivered: bool) -> None:
            if delivered:
                self.send(push.peer, push.notice, num_intact=bad)
            self.perform(self.handoffs.source.push_settled(handoff_id, sequence, delivered=delivered))

        def arrive() -> None:
            if self.alive and self.frozen:
                self._on_thaw.append(arrive)  # a frozen process writes when it thaws
                return
            target = self.find(push.peer)
            too_late = not self.alive and world.now > born_s + LEASE.settle_s
            if target is not None and not too_late:
                target.write(self, push, bad)
            self.do(lambda: settle(delivered=target is not None and not fails))

        if push.peer in self.connected:
            world.at(min(world.late(), LEASE.settle_s * 0.9), arrive)
        else:
            world.at(0.0, lambda: self.do(lambda: settle(delivered=False)))

    def write(self, source: Host, push: Push, bad: int) -> None:
        """Bytes come from `source`, those of one block perhaps wrong; no process of ours is asked."""
        locked = locked_blocks(self.handoffs.target, push.notice.handoff_id)
        if not set(push.target_blocks) <= set(locked):
            raise WriteIntoForeignBlock(f"t={self.world.now:.2f} {push} into {self.ref}: locked for it are {locked}")
        for index, (theirs, ours) in enumerate(zip(push.source_blocks, push.target_blocks, strict=True)):
            for offset in range(BLOCK_SIZE):
                token = source.memory.slots.get((theirs, offset))
                if token is not None:
                    self.memory.slots[ours, offset] = token ^ (index == bad)

    def notify(self, peer: WorkerRef, notice: HandoffNotice) -> None:
        world = self.world

        def post() -> None:
            if peer not in self.connected or self.find(peer) is None or world.rng.random() < world.faults.break_path:
                self.peer_lost(peer)
            else:
                self.send(peer, notice)

        world.at(0.0, lambda: self.do(post))

    def send(self, peer: WorkerRef, notice: HandoffNotice, num_intact: int | None = None) -> None:
        faults, rng = self.world.faults, self.world.rng
        copies = (rng.random() >= faults.lose_notice) + (rng.random() < faults.double_notice)
        for _ in range(copies):
            self.world.at(self.world.late(), lambda: self.receive(peer, notice, num_intact))

    def receive(self, peer: WorkerRef, notice: HandoffNotice, num_intact: int | None) -> None:
        target = self.find(peer)
        if target is None:
            return

        def hear() -> None:
            sessions = target.handoffs
            if num_intact is not None and num_intact < len(sessions.target.pages(self.ref, notice)):
                sessions.target.damaged(self.ref, notice, num_intact)
            target.perform(sessions.notice(self.ref, notice, self.world.now))

        target.do(hear)


def _no_watch(_request: GenerateRequest) -> object:
    raise AssertionError("no request here has stop strings")
