"""A whole cluster on virtual time: clients, router, workers, keeper and index, with every fault they have.

The quiet code is the real one: Dispatcher, ClusterView, RouterStreams, both role sessions, HandoffSessions, Scheduler
and BlockPool. What stands around it here stands in for router/live.py, cluster/worker_host.py, kv_transfer/driver.py
and cluster/controller.py. KV is real too, in small: a slot holds a digest of the salt and of every token up to it, and
the next token is a digest of all slots, so whoever reads a stale, foreign or misplaced block draws differently.

Invariants: a client's stream is the beginning of its undisturbed run, each position once and in order, and ends, in
time, with a finish or one clear error; bytes only ever reach pages that are locked for their hand-off, and steps only
blocks in use; when all requests are over, every block is back and every table is empty. One seed is one run.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from cluster.router_streams import RouterStream, RouterStreams
from core.errors import BadRequest, Rejected, RejectReason, TandemError
from core.handoff import BlocksPushed, HandoffNotice
from core.identity import BlockHash
from core.membership import Life, Role, WorkerInfo, WorkerLoad, WorkerRef
from core.messages import (
    Answer,
    CancelRequest,
    Command,
    PeerConnected,
    PeerDead,
    PeerJoined,
    Refused,
    ReserveBlocks,
    Reserved,
    StartGeneration,
    StartPrefill,
)
from core.request import FinishReason, GenerateRequest, Placement, SamplingParams, StopConditions, TokenDelta
from decode_worker.session import DecodeConfig, DecodeSession
from engine.block_pool import BlockPool
from engine.scheduler import Scheduler
from engine.scheduler_config import SchedulerConfig
from engine.sequence import ModelLimits
from engine.step import Drawn, SequenceSlice, StepPlan
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
from router.dispatcher import Deliver, Dispatcher, DispatcherConfig, Effect, Fail, Planned, Send
from router.view import ClusterView
from tests.engine.token_memory import TokenMemory, next_token, seed_of

BLOCK_SIZE = 4
NUM_BLOCKS = 24
LIMITS = ModelLimits(BLOCK_SIZE, max_context_tokens=64, eos_token_ids=tuple(range(20)))
LEASE = LeaseConfig(lease_s=5.0, renew_s=1.0, settle_s=1.0, stop_retry_s=1.0, landed_timeout_s=5.0)
DISPATCH = DispatcherConfig(max_open_requests=64, queue_timeout_s=15.0, request_timeout_s=1000.0)  # no hang ends by it
SILENCE_TIMEOUT_S = 4.0
FAULTS_END_S = 25.0
END_S = 90.0  # by then every request must be over: each lease and bounded wait has passed


class WriteIntoForeignBlock(Exception):
    """Bytes reached a page that was not locked for their hand-off, or a step a block that nobody holds."""


class WrongStream(Exception):
    """A client saw what its undisturbed run does not hold, or saw it twice, late or never."""


class Leak(Exception):
    """Something is still held, or still known, when all requests are over."""


@dataclass(frozen=True, slots=True)
class Faults:
    """Chances of each fault, and the most that anything is late, in seconds."""

    lose_notice: float = 0.05
    double_notice: float = 0.1
    fail_push: float = 0.03
    corrupt_block: float = 0.03  # of a push: found by its checksum
    break_path: float = 0.02  # a notice finds its peer unreachable
    late_s: float = 0.5
    cancel: float = 0.25
    reuse_id: float = 0.3
    num_disturbances: int = 4  # kills, freezes, broken streams, restarted routers
    index_away: float = 0.2


NO_FAULTS = Faults(0, 0, 0, 0, 0, 0.05, 0, 0, 0, 0)


class ChainMemory(TokenMemory):
    """A slot holds a digest of the salt and of all tokens up to its own, as real KV depends on all of them."""

    def __init__(self, pool: BlockPool, salt_of: Callable[[str], str]) -> None:
        super().__init__(pool, BLOCK_SIZE)
        self._salt_of = salt_of

    def _write(self, item: SequenceSlice) -> None:
        before = self._before(item)
        for position, token in enumerate(item.token_ids, item.start):
            before = self.slots[self._slot(item, position)] = chained(before, token)

    def _before(self, item: SequenceSlice) -> int:
        if item.start == 0:
            return salted(self._salt_of(item.request_id))
        return self.slots.get(self._slot(item, item.start - 1), -1) & 0xFFFFFFFF


def salted(salt: str) -> int:
    return next_token([*salt.encode()])


def chained(before: int, token: int) -> int:
    return (before * 1_000_003 + token * 7919 + 17) % (1 << 32)


def undisturbed(request: GenerateRequest, choice: int = 0) -> list[int]:
    """The output of a choice of a request that runs alone."""
    slots: list[int] = []
    seed = seed_of(request.sampling.for_choice(choice))
    output: list[int] = []
    before = salted(request.cache_salt)
    for token in request.prompt_token_ids:
        before = chained(before, token)
        slots.append(before)
    while True:
        output.append(next_token(slots, seed))
        known = request.num_prompt_tokens + len(output)
        if output[-1] in LIMITS.eos_token_ids or len(output) == request.stop.max_tokens or known == 64:
            return output
        before = chained(before, output[-1])
        slots.append(before)


@dataclass(eq=False)
class Client:
    """One request as its client sees it; outputs by choice."""

    request: GenerateRequest
    expected: list[list[int]]
    received: list[list[int]] = field(init=False)
    finishes: dict[int, FinishReason] = field(default_factory=dict)
    error: TandemError | None = None
    left: bool = False
    submitted_s: float = 0.0
    last_s: float = float("inf")
    longest_gap_s: float = 0.0
    num_migrations: int = 0  # plans after tokens were out

    def __post_init__(self) -> None:
        self.received = [[] for _ in self.expected]

    @property
    def finished(self) -> bool:
        return len(self.finishes) == len(self.expected)

    @property
    def over(self) -> bool:
        return self.left or self.finished or self.error is not None

    def deliver(self, delta: TokenDelta, now: float) -> None:
        self.longest_gap_s = max(self.longest_gap_s, now - self.last_s)
        self.last_s = now
        received, expected = self.received[delta.choice], self.expected[delta.choice]
        at = len(received)
        if (self.over and not self.left) or delta.choice in self.finishes:
            raise WrongStream(f"{self.request.request_id}: more after the end: {delta}")
        if delta.position != at or list(delta.token_ids) != expected[at : at + len(delta.token_ids)]:
            raise WrongStream(f"{self.request.request_id}: got {delta}, expected {expected[at:]} from {at} on")
        received += delta.token_ids
        if delta.finish_reason is not None:
            self.finishes[delta.choice] = delta.finish_reason
            if len(received) != len(expected):
                raise WrongStream(f"{self.request.request_id}: ended after {len(received)} of {len(expected)}")

    def fail(self, error: TandemError) -> None:
        if self.over:
            raise WrongStream(f"{self.request.request_id}: a second end: {error}")
        self.error = error


class World:
    """Two prefill workers, two decode workers, one router, and a list of what is to happen."""

    def __init__(self, seed: int, faults: Faults, priorities: tuple[int, ...] = (0,), choices: tuple[int, ...] = (1,)):
        self.rng = random.Random(seed)
        self.faults = faults
        self.priorities = priorities  # given to requests in turn, and so are numbers of choices
        self.choices = choices
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._lives = itertools.count(1)
        self.clients: list[Client] = []
        self.index: dict[BlockHash, dict[WorkerRef, None]] = {}
        self.salts: dict[str, str] = {}  # by attempt id
        self.hosts: dict[str, Host] = {}
        self.deaths: list[WorkerRef] = []
        self.router: Router | None = Router(self, "router-1")
        for place in ("p0", "p1", "d0", "d1"):
            self.start(place)

    # --- time ---

    def at(self, delay_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._order), what))

    def late(self) -> float:
        return self.rng.uniform(0, self.faults.late_s)

    def run(self, num_requests: int) -> None:
        """Submit requests at random moments under faults, then let everything end; raises what is wrong."""
        for _ in range(num_requests):
            self.at(self.rng.uniform(1, 20), self.submit)
        for step in range(int(END_S / 0.25)):
            self.at(step * 0.25, self.tick)
        for _ in range(self.faults.num_disturbances):
            self.at(self.rng.uniform(2, 20), self.disturb)
        self.at(FAULTS_END_S, self.heal)
        while self._events and self._events[0][0] < END_S:
            self.now, _, what = heapq.heappop(self._events)
            what()
        self.check_over()

    def tick(self) -> None:
        if self.router is not None:
            self.router.tick()
        for host in list(self.hosts.values()):
            host.do(host.tick)
            host.pool.check()

    def heal(self) -> None:
        """No new faults from here on: what is under way must now end by itself."""
        self.faults = NO_FAULTS
        for host in self.hosts.values():
            host.thaw()

    # --- clients ---

    def submit(self) -> None:
        number = len(self.clients)
        family = self.rng.randrange(2) * 100  # few distinct prefixes: many hits
        prefix = range(family, family + 40)
        kept = self.rng.randrange(41)
        prompt = (*prefix[:kept], *(self.rng.randrange(1000) for _ in range(self.rng.randrange(1, 6))))
        known = {client.request.request_id for client in self.clients}
        reusable = sorted(known - {client.request.request_id for client in self.clients if not client.over})
        reused = reusable and self.rng.random() < self.faults.reuse_id
        request = GenerateRequest(
            request_id=self.rng.choice(reusable) if reused else f"r{number}",
            prompt_token_ids=prompt,
            sampling=SamplingParams(seed=number) if number % 2 else SamplingParams(0.0),
            stop=StopConditions(max_tokens=self.rng.randrange(1, 64 - len(prompt) + 1)),
            num_choices=self.choices[number % len(self.choices)],
            cache_salt=self.rng.choice(["", "", "other"]),
            priority=self.priorities[number % len(self.priorities)],
        )
        expected = [undisturbed(request, choice) for choice in range(request.num_choices)]
        client = Client(request, expected, submitted_s=self.now)
        self.clients.append(client)
        if self.router is None:
            client.fail(Rejected(RejectReason.NO_WORKER, "the router is away"))
            return
        self.router.submit(client, self.rng.choice(list(Placement)))
        if self.rng.random() < self.faults.cancel:
            self.at(self.rng.choice([0.0, self.rng.uniform(0, 1), self.rng.uniform(0, 5)]), lambda: self.leave(client))

    def leave(self, client: Client) -> None:
        if not client.over:
            client.left = True
            if self.router is not None:
                self.router.leave(client)

    # --- faults ---

    def disturb(self) -> None:
        host = self.rng.choice(list(self.hosts.values()))
        match self.rng.randrange(5):
            case 0 | 1:
                self.kill(host)
            case 2:
                host.frozen = True
                self.at(self.rng.uniform(0.5, 8), host.thaw)
            case 3:
                if self.router is not None and host.ref in self.router.links:
                    self.router.links[host.ref].cut()
            case 4:
                self.restart_router()

    def start(self, place: str) -> None:
        host = Host(self, WorkerRef(place, str(next(self._lives))), Role.PREFILL if place[0] == "p" else Role.DECODE)
        self.hosts[place] = host

    def kill(self, host: Host) -> None:
        """The process ends. Its keeper sees to it that it is gone, reports that, and starts another."""
        if not host.alive:
            return
        host.alive = False
        for link in list(host.links):
            self.at(self.late(), link.cut)
        self.at(self.rng.uniform(0.1, 2), lambda: self.report_death(host.ref))
        self.at(self.rng.uniform(0.5, 2), lambda: self.start(host.ref.worker_id))

    def report_death(self, ref: WorkerRef) -> None:
        """As cluster/death_notices.py: a router that starts anew is told of all deaths."""
        self.deaths.append(ref)
        if self.router is not None:
            self.router.report_death(ref)

    def restart_router(self) -> None:
        router, self.router = self.router, None
        if router is None:
            return
        for client in router.clients.values():
            if not client.over:
                client.fail(Rejected(RejectReason.DRAINING, "the router died"))
        for link in list(router.links.values()):
            link.on_lost = lambda: None
            link.cut()

        def again() -> None:
            self.router = Router(self, f"router-{next(self._lives)}")
            for ref in self.deaths:
                self.router.report_death(ref)

        self.at(self.rng.uniform(0.5, 3), again)

    # --- the end ---

    def check_over(self) -> None:
        for client in self.clients:
            if not client.over:
                raise WrongStream(f"{client.request.request_id} never ended, {client.received} are out")
        assert self.router is not None
        books = [
            (worker.open_requests, worker.open_tokens, worker.prefills.num_tokens)
            for worker in self.router.view.workers()
        ]
        if self.router.dispatcher.num_open or self.router.dispatcher._attempts or any(map(any, books)):
            raise Leak(f"router: {self.router.dispatcher._attempts} {books}")
        for host in self.hosts.values():
            left = host.left()
            if left:
                raise Leak(f"{host.ref}: {left}")


class Link:
    """One router's stream to one worker: each way in order, late, and broken at once or not at all."""

    def __init__(self, world: World, router: Router, host: Host) -> None:
        self.world = world
        self.router = router
        self.host = host
        self.open = True
        self.heard_at_s = world.now
        self.on_lost = lambda: router.lost(host.ref)
        self.ready = False
        self.stream: RouterStream | None = None
        self._free_at = {"down": 0.0, "up": 0.0}
        self._deliver("down", lambda: host.do(lambda: self.open and host.router_opened(self)))

    def _deliver(self, way: str, what: Callable[[], None]) -> None:
        at_s = max(self._free_at[way], self.world.now + self.world.late())
        self._free_at[way] = at_s
        self.world.at(at_s - self.world.now, what)

    def command(self, command: Command) -> None:
        self._deliver("down", lambda: self.host.do(lambda: self.open and self.host.command(self, command)))

    def answer(self, answer: Answer) -> None:
        self._deliver("up", lambda: self.open and self._heard(answer))

    def _heard(self, answer: Answer) -> None:
        self.heard_at_s = self.world.now
        if not self.ready:
            self.ready = True
            self.router.opened(self.host)
        self.router.perform(self.router.dispatcher.answered(self.host.ref, answer, self.world.now))

    def cut(self) -> None:
        """Both ends hear of it, each in its own time."""
        if self.open:
            self.open = False
            self.on_lost()
            self.world.at(self.world.late(), lambda: self.host.do(lambda: self.host.router_closed(self)))


class Router:
    """Stands in for router/live.py."""

    def __init__(self, world: World, router_id: str) -> None:
        self.world = world
        self.view = ClusterView()
        self.dispatcher = Dispatcher(DISPATCH, self.view, router_id)
        self.links: dict[WorkerRef, Link] = {}
        self.clients: dict[str, Client] = {}
        self.deaths: list[WorkerRef] = []

    def submit(self, client: Client, placement: Placement) -> None:
        request = client.request
        try:
            effects = self.dispatcher.submit(request, placement, self.world.now)
        except (BadRequest, Rejected) as error:
            client.fail(error)
            return
        self.clients[request.request_id] = client
        self.perform(effects)

    def leave(self, client: Client) -> None:
        self.perform(self.dispatcher.cancel(client.request.request_id))

    def announce(self, host: Host, load: WorkerLoad) -> bool:
        """False: given up, the worker must end."""
        worker = self.view.get(host.ref)
        if worker is not None:
            worker.load = load
            return True
        try:
            self.view.register(host.info)
        except BadRequest:
            return False
        self.links[host.ref] = Link(self.world, self, host)
        return True

    def opened(self, host: Host) -> None:
        self.view.ready(host.ref)
        for ref in self.deaths:
            self.links[host.ref].command(PeerDead(ref))
        for other in self.view.workers():
            if other.ref != host.ref and other.life is not Life.STARTING:
                self.links[host.ref].command(PeerJoined(other.info))
                self.links[other.ref].command(PeerJoined(host.info))
        self.perform(self.dispatcher.serve_queue(self.world.now))

    def lost(self, ref: WorkerRef) -> None:
        self.links.pop(ref, None)
        self.perform(self.dispatcher.worker_lost(ref, self.world.now))

    def report_death(self, ref: WorkerRef) -> None:
        if ref in self.links:
            self.links[ref].cut()
        self.view.lose(ref)
        self.deaths.append(ref)
        for other in self.links.values():
            other.command(PeerDead(ref))

    def tick(self) -> None:
        for link in list(self.links.values()):
            if self.world.now - link.heard_at_s > SILENCE_TIMEOUT_S:
                link.cut()
        self.perform(self.dispatcher.tick(self.world.now))

    def perform(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(worker, command):
                    if isinstance(command, StartGeneration | ReserveBlocks | StartPrefill):
                        self.world.salts[command.request.request_id] = command.request.cache_salt
                    self.links[worker].command(command)
                case Deliver(request_id, delta):
                    self.clients[request_id].deliver(delta, self.world.now)
                case Fail(request_id, error):
                    self.clients[request_id].fail(error)
                case Planned(request_id):
                    client = self.clients[request_id]
                    client.num_migrations += any(client.received)


class Host:
    """One incarnation of a worker: stands in for cluster/worker_host.py, the role services and the driver."""

    def __init__(self, world: World, ref: WorkerRef, role: Role) -> None:
        self.world = world
        self.ref = ref
        self.alive = True
        self.frozen = False
        self._on_thaw: list[Callable[[], None]] = []
        self.pool = BlockPool(NUM_BLOCKS)
        self.memory = ChainMemory(self.pool, world.salts.__getitem__)
        budget = world.rng.choice([8, 16, 64])
        self.scheduler = Scheduler(SchedulerConfig(budget, 16), self.pool, LIMITS, b"id", _no_watch)
        policy = world.rng.choice(list(LoadFailurePolicy))
        self.handoffs = HandoffSessions(ref, self.pool, LEASE, self.pool.match, load_failure=policy)
        self.session: PrefillSession | DecodeSession
        if role is Role.PREFILL:
            self.session = PrefillSession(PrefillConfig(1, min_fetch_blocks=2), self.scheduler, self.handoffs)
        else:
            self.session = DecodeSession(DecodeConfig(1, reserve_timeout_s=8.0), self.scheduler, self.handoffs)
        self.info = WorkerInfo(ref, role, f"{ref}", b"id", BLOCK_SIZE, 1, NUM_BLOCKS, 64)
        self.streams = RouterStreams()
        self.links: dict[Link, None] = {}
        self.peers: dict[WorkerRef, None] = {}  # known and not dead
        self.connected: dict[WorkerRef, None] = {}
        self.stepping = False
        self.say_at_s = 0.0

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

    def thaw(self) -> None:
        self.frozen = False
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
        }
        return {name: value for name, value in found.items() if value}

    # --- routers ---

    def router_opened(self, link: Link) -> None:
        link.stream = self.streams.open("router")
        self.links[link] = None
        self.streams.step((), self.scheduler.load())

    def router_closed(self, link: Link) -> None:
        if link in self.links:
            del self.links[link]
            assert link.stream is not None
            for request_id in self.streams.close(link.stream):
                self.perform(self.session.cancel(request_id, self.world.now))

    def flush(self) -> None:
        for link in self.links:
            while link.stream is not None and not link.stream.outbox.empty():
                answer = link.stream.outbox.get_nowait()
                assert answer is not None
                link.answer(answer)

    def command(self, link: Link, command: Command) -> None:
        now, session = self.world.now, self.session
        if link.stream is not None and isinstance(command, StartGeneration | ReserveBlocks | StartPrefill):
            self.streams.own(link.stream, command.request.request_id)
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

    # --- steps and time ---

    def wake(self) -> None:
        if self.stepping or (plan := self.scheduler.plan()) is None:
            return
        self.stepping = True
        duration_s = self.world.rng.uniform(0.02, 0.2)
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
        self.streams.step(deltas, self.scheduler.load())
        for item in progress:
            if item.ended:
                self.streams.disown(item.request_id)
        self.publish()

    def publish(self) -> None:
        changes = self.pool.take_changes()
        index, rng = self.world.index, self.world.rng

        def write() -> None:
            for block_hash in changes.stored:
                index.setdefault(block_hash, {})[self.ref] = None
            for block_hash in changes.evicted:
                index.get(block_hash, {}).pop(self.ref, None)

        if (changes.stored or changes.evicted) and rng.random() >= self.world.faults.index_away:
            self.world.at(self.world.late(), write)

    def tick(self) -> None:
        now = self.world.now
        self.perform(self.handoffs.tick(now))
        self.perform(self.session.tick(now))
        if now < self.say_at_s:
            return
        self.say_at_s = now + 1.0
        self.streams.step((), self.scheduler.load())
        if self.world.router is not None and not self.world.router.announce(self, self.scheduler.load()):
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
        def answer() -> None:
            assert isinstance(self.session, PrefillSession)
            num_blocks, holder = 0, None
            if self.world.rng.random() >= self.world.faults.index_away:
                num_blocks, holder = self.longest_run(block_hashes)
            self.perform(self.session.prefix_found(request_id, num_blocks, holder, self.world.now))

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
        locked = self.handoffs.target.blocks(push.notice.handoff_id)
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
