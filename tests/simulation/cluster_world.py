"""A whole cluster on virtual time: clients, routers, workers, keeper, index and the server of shared limits, with every
fault they have.

The quiet code is the real one: Dispatcher, ClusterView, RouterStreams, both role sessions, HandoffSessions, Scheduler
and BlockPool. What stands around it here stands in for router/live.py, cluster/worker_host.py, kv_transfer/driver.py
and cluster/controller.py. KV is real too, in small: a slot holds a digest of the salt and of every token up to it, and
the next token is a digest of all slots, so whoever reads a stale, foreign or misplaced block draws differently.

Invariants: a client's stream is the beginning of its undisturbed run, each position once and in order, and ends, in
time, with a finish or one clear error; bytes only ever reach pages that are locked for their hand-off, and steps only
blocks in use; no worker goes on with what no router waits for; no tenant has more open than it may have
(tests/simulation/world_limits.py); when all requests are over, every block and permit is back and every table is empty.
One seed is one run.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

from cluster.router_streams import RouterStream
from core.errors import BadRequest, Rejected, RejectReason
from core.identity import BlockHash, pack_keys, unpack_keys
from core.membership import Life, Role, WorkerLoad, WorkerRef
from core.messages import (
    Answer,
    CacheEvents,
    Command,
    PeerDead,
    PeerJoined,
    RefuseReason,
    ReserveBlocks,
    StartGeneration,
    StartPrefill,
    StepOutput,
)
from core.request import GenerateRequest, Placement, SamplingParams, StopConditions
from router.admission.limits import Permit
from router.admission.policy import AdmissionPolicy
from router.admission.room import PromptsOut
from router.config import DispatcherConfig
from router.dispatcher import Dispatcher
from router.effects import Deliver, Effect, Fail, Planned, RaceEnded, Send
from router.policy.prompt_keys import prompt_keys
from router.policy.routing_policy import RoutingPolicy
from router.view import ClusterView
from tests.simulation.chained_kv import undisturbed
from tests.simulation.world_client import Client, WrongStream
from tests.simulation.world_host import Host
from tests.simulation.world_limits import TENANTS, Asking, Leak, RouterLimits, SharedServer

# Attempts run out more often than in production, and no hang ends by the time limit.
DISPATCH = DispatcherConfig(max_open_requests=64, queue_timeout_s=15.0, max_silent_failures=2, request_timeout_s=1000.0)
SILENCE_TIMEOUT_S = 4.0
HEARTBEAT_S = 1.5
FAULTS_END_S = 25.0
END_S = 90.0  # by then every request must be over: each lease and bounded wait has passed


class PlannedOntoNobody(Exception):
    """A router plans onto a worker of which it knows that it is not ready."""


class WrongHedge(Exception):
    """A second attempt that there must not be."""


class WrongView(Exception):
    """The router believes what is not so, long after it was told."""


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
    num_disturbances: int = 4  # kills, freezes, broken streams, restarted routers; partitions where routers are several
    index_away: float = 0.2
    num_drains: int = 3  # most of them; before the end of a life, or for another role
    drain_timeout_s: float = 1.0  # after what runs should have left
    lose_events: float = 0.05  # of a worker's cache
    double_events: float = 0.05
    reorder_events: float = 0.05
    num_slow: int = 0  # workers that become slow for a while
    num_limit_troubles: int = 2  # of the server that routers share their tenants' limits in


NO_FAULTS = Faults(
    0,
    0,
    0,
    0,
    0,
    0.05,
    0,
    0,
    0,
    0,
    num_drains=0,
    lose_events=0,
    double_events=0,
    reorder_events=0,
    num_limit_troubles=0,
)


class World:
    """Two prefill workers, two decode workers, one router or more, and a list of what is to happen."""

    def __init__(
        self,
        seed: int,
        faults: Faults,
        priorities: tuple[int, ...] = (0,),
        choices: tuple[int, ...] = (1,),
        num_routers: int = 1,
        dispatch: DispatcherConfig = DISPATCH,
        admission: AdmissionPolicy | None = None,
        routing: RoutingPolicy | None = None,
    ):
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
        self.dispatch = dispatch
        self.admission = admission  # with LIMITED, requests are of its tenants, and of none
        self.routing = routing
        self.limits_server = SharedServer(self)
        self.hedges: Counter[str] = Counter()
        self.roles = {place: Role.PREFILL if place[0] == "p" else Role.DECODE for place in ("p0", "p1", "d0", "d1")}
        self.drains: Counter[tuple[str, str]] = Counter()
        self.refused: Counter[RefuseReason] = Counter()
        self.routers: list[Router | None] = [Router(self, number, "1") for number in range(num_routers)]
        self.num_taken_back = 0  # workers that a router had lost, and that greeted it again
        for place in self.roles:
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
        for _ in range(self.faults.num_disturbances):
            self.at(self.rng.uniform(2, 20), self.disturb)
        for _ in range(self.faults.num_drains):
            self.at(self.rng.uniform(2, 20), self.drain)
        for _ in range(self.faults.num_slow):
            self.at(self.rng.uniform(2, 20), self.slow_down)
        for _ in range(self.faults.num_limit_troubles if self.admission else 0):
            self.at(self.rng.uniform(1, 20), self.limits_server.trouble)
        self.at(FAULTS_END_S, self.heal)
        self.run_until(END_S)
        self.check_over()

    def run_until(self, end_s: float) -> None:
        for step in range(int(end_s / 0.25)):
            self.at(step * 0.25, self.tick)
        while self._events and self._events[0][0] < end_s:
            self.now, _, what = heapq.heappop(self._events)
            what()

    def tick(self) -> None:
        for router in self.routers:
            if router is not None:
                router.tick()
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
        place = self.rng.randrange(len(self.routers)) if len(self.routers) > 1 else 0
        router = self.routers[place]
        known = {client.request.request_id for client in self.clients}
        reusable = sorted(
            known - {name for name, client in (router.clients if router else {}).items() if not client.over}
        )
        reused = reusable and self.rng.random() < self.faults.reuse_id
        request = GenerateRequest(
            request_id=self.rng.choice(reusable) if reused else f"r{number}",
            prompt_token_ids=prompt,
            sampling=SamplingParams(seed=number) if number % 2 else SamplingParams(0.0),
            stop=StopConditions(max_tokens=self.rng.randrange(1, 64 - len(prompt) + 1)),
            num_choices=self.choices[number % len(self.choices)],
            cache_salt=self.rng.choice(["", "", "other"]),
            priority=self.priorities[number % len(self.priorities)],
            tenant=self.rng.choice(TENANTS) if self.admission else "",
        )
        client = self.ask(router, request, self.rng.choice(list(Placement)))
        if router is not None and self.rng.random() < self.faults.cancel:
            delay_s = self.rng.choice([0.0, self.rng.uniform(0, 1), self.rng.uniform(0, 5)])
            self.at(delay_s, lambda: self.leave(router, client))

    def ask(self, router: Router | None, request: GenerateRequest, placement: Placement = Placement.AUTO) -> Client:
        """A client sends `request` to a router now."""
        expected = [undisturbed(request, choice) for choice in range(request.num_choices)]
        client = Client(request, expected, submitted_s=self.now)
        self.clients.append(client)
        if router is None:
            client.fail(Rejected(RejectReason.NO_WORKER, "the router is away"))
        else:
            router.submit(client, placement)
        return client

    def leave(self, router: Router, client: Client) -> None:
        if not client.over:
            client.left = True
            router.leave(client)

    # --- faults ---

    def disturb(self) -> None:
        host = self.rng.choice(list(self.hosts.values()))
        router = self.rng.choice(self.routers) if len(self.routers) > 1 else self.routers[0]
        match self.rng.randrange(5 if len(self.routers) == 1 else 7):
            case 0 | 1:
                self.kill(host)
            case 2:
                host.frozen = True
                self.at(self.rng.uniform(0.5, 8), host.thaw)
            case 3:
                if router is not None and host.ref in router.links:
                    router.links[host.ref].cut()
            case 4:
                if router is not None:
                    self.restart_router(router)
            case 5 | 6:
                if router is not None:
                    router.cut_off(self.rng.choice([[host], list(self.hosts.values())]), self.rng.uniform(0.5, 8))

    def slow_down(self) -> None:
        host = self.rng.choice(list(self.hosts.values()))
        host.slow_down(self.rng.choice([4.0, 16.0]), self.rng.uniform(1, 6))

    def drain(self) -> None:
        """As their keeper: one drain at a time. The last of a role goes on: some ask for a remote prefill."""
        host = self.rng.choice(list(self.hosts.values()))
        place, finish_s = host.ref.worker_id, self.rng.choice([0.0, self.rng.uniform(0, 3)])
        ready = [it for it in self.hosts.values() if it.alive and not it.frozen and not it.role.draining]
        others = [it for it in ready if it is not host and it.role.role is host.role.role]
        if len(ready) < len(self.hosts) or not others:
            return
        before, to = self.roles[place], Role.DECODE if self.roles[place] is Role.PREFILL else Role.PREFILL
        if self.rng.random() < 0.3:
            self.drain_host(host, finish_s, None, lambda _outcome: self.kill(host))
            return

        def switched(outcome: str) -> None:
            if outcome:
                self.roles[place] = before

        self.roles[place] = to
        self.drain_host(host, finish_s, to, switched)

    def drain_host(self, host: Host, finish_s: float, to: Role | None, then: Callable[[str], None]) -> None:
        def ended(outcome: str) -> None:
            self.drains["switch" if to else "end", "in time" if not outcome else "not idle"] += 1
            then(outcome)

        host.do(lambda: host.drain(finish_s, finish_s + self.faults.drain_timeout_s, to, ended))

    def start(self, place: str) -> None:
        self.hosts[place] = Host(self, WorkerRef(place, str(next(self._lives))), self.roles[place])

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
        """As cluster/death_notices.py: each router hears of it in its own time, one that starts anew of all deaths."""
        self.deaths.append(ref)
        for router in self.routers:
            if router is not None:
                self.at(self.rng.uniform(0, 3) if len(self.routers) > 1 else 0.0, partial(router.report_death, ref))

    def restart_router(self, router: Router) -> None:
        """It ends with its clients' streams, and another one takes its place."""
        self.routers[router.number] = None
        router.limits.dead = True
        for client in [*router.clients.values(), *router.asking]:
            if not client.over:
                client.fail(Rejected(RejectReason.DRAINING, "the router died"))
        for link in list(router.links.values()):
            link.on_lost = lambda: None
            link.cut()

        def again() -> None:
            another = Router(self, router.number, str(next(self._lives)))
            self.routers[router.number] = another
            for ref in self.deaths:
                another.report_death(ref)

        self.at(self.rng.uniform(0.5, 3), again)

    # --- the end ---

    def check_over(self) -> None:
        for client in self.clients:
            if not client.over:
                raise WrongStream(f"{client.request.request_id} never ended, {client.received} are out")
        for router in self.routers:
            assert router is not None
            router.check_over()
            router.check_prefixes()
        self.limits_server.check_over()
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
        self.beat_at_s = world.now
        self.on_lost = lambda: router.lost(host.ref)
        self.ready = False
        self.stream: RouterStream | None = None
        self.tail_is_lost = False  # the router cannot know yet that it misses an event
        self._held: CacheEvents | None = None
        self._free_at = {"down": 0.0, "up": 0.0}
        self.broken_until_s = 0.0  # nothing passes before
        self._deliver("down", lambda: host.do(lambda: self.open and host.router_opened(self)))

    def _deliver(self, way: str, what: Callable[[], None]) -> None:
        at_s = max(self._free_at[way], self.broken_until_s, self.world.now + self.world.late())
        self._free_at[way] = at_s
        self.world.at(at_s - self.world.now, what)

    def unwanted(self) -> list[str]:
        """Attempts of the worker that the router has given up, and must have told it so."""
        if not self.open or self.stream is None or self.world.now < self._free_at["down"]:
            return []
        attempts = self.router.dispatcher._books.attempts
        return [request_id for request_id in self.stream.requests if request_id not in attempts]

    def heartbeat(self) -> None:
        self.beat_at_s = self.world.now
        delay_s = max(0.0, self.broken_until_s - self.world.now)
        self.world.at(delay_s, lambda: self.host.do(lambda: self.open and self.host.heard(self)))

    def command(self, command: Command) -> None:
        self._deliver("down", lambda: self.host.do(lambda: self.open and self.host.command(self, command)))

    def answer(self, answer: Answer) -> None:
        for item in self._faulty(answer) if isinstance(answer, StepOutput) and answer.cache else [answer]:
            self._deliver("up", lambda item=item: self.open and self._heard(item))

    def _faulty(self, answer: StepOutput) -> list[Answer]:
        """The events of a worker's cache get lost, doubled, and overtaken by those that follow."""
        faults, rng = self.world.faults, self.world.rng
        events, held, self._held = answer.cache, self._held, None
        said = [events] * ((rng.random() >= faults.lose_events) + (rng.random() < faults.double_events))
        self.tail_is_lost = not said
        if said and held is None and rng.random() < faults.reorder_events:
            said, self._held, self.tail_is_lost = [], events, True
        if held is not None:
            said.append(held)
        first = replace(answer, cache=said[0] if said else None)
        return [first, *(StepOutput((), answer.load, answer.others, more) for more in said[1:])]

    def _heard(self, answer: Answer) -> None:
        self.heard_at_s = self.world.now
        if not self.ready:
            self.ready = True
            self.router.opened(self.host)
        self.router.perform(self.router.dispatcher.answered(self.host.ref, answer, self.world.now))

    def closed_by_host(self) -> None:
        self.world.at(max(self.world.late(), self.broken_until_s - self.world.now), self.cut)

    def cut(self) -> None:
        """Both ends hear of it, each in its own time."""
        if self.open:
            self.open = False
            self.on_lost()
            delay_s = max(self.world.late(), self.broken_until_s - self.world.now)
            self.world.at(delay_s, lambda: self.host.do(lambda: self.host.router_closed(self)))


class Router:
    """Stands in for router/live.py."""

    def __init__(self, world: World, number: int, life: str) -> None:
        self.world = world
        self.number = number
        self.router_id = f"router-{number}-{life}"
        self.view = ClusterView()
        self.dispatcher = Dispatcher(world.dispatch, self.view, self.router_id)
        if world.admission is not None:
            self.dispatcher.admission.policy = world.admission
        self.dispatcher.planner.routing = world.routing or RoutingPolicy()
        self.num_planned = 0  # requests
        self.num_hedges = 0
        self.limits = RouterLimits(
            world, number, self.router_id, lambda name: self.dispatcher.admission.policy.tenant(name)
        )
        self.asking: dict[Client, Asking] = {}  # for their permits
        self.cut_off_until_s: dict[WorkerRef, float] = {}
        self.lost_once: set[WorkerRef] = set()
        self.links: dict[WorkerRef, Link] = {}
        self.clients: dict[str, Client] = {}
        self.deaths: list[WorkerRef] = []

    def submit(self, client: Client, placement: Placement) -> None:
        def decided(outcome: Permit | Rejected) -> None:
            self.asking.pop(client, None)
            if isinstance(outcome, Rejected):
                client.fail(outcome)
                return
            client.permit = outcome
            self._serve(client, placement)

        asking = self.limits.take(client.request, self.dispatcher.admission.expected.of(client.request), decided)
        if asking is not None and not asking.over:
            self.asking[client] = asking

    def _serve(self, client: Client, placement: Placement) -> None:
        request = client.request
        try:
            workers = self.view.workers()
            keys = [key for piece in prompt_keys(request, workers[0].info) for key in piece] if workers else []
            effects = self.dispatcher.submit(request, placement, self.world.now, keys=keys)
        except (BadRequest, Rejected) as error:
            client.fail(error)
            self._over(client)
            return
        self.clients[request.request_id] = client
        self.perform(effects)

    def leave(self, client: Client) -> None:
        asking = self.asking.pop(client, None)
        if asking is not None:
            self.limits.cancel(asking)
            return
        self.perform(self.dispatcher.cancel(client.request.request_id, self.world.now))
        self._over(client)

    def _over(self, client: Client) -> None:
        permit, client.permit = client.permit, None
        if permit is not None:
            used_tokens = client.num_received and client.request.num_prompt_tokens + client.num_received
            self.limits.give_back(permit, used_tokens)

    def cut_off(self, hosts: Iterable[Host], duration_s: float) -> None:
        """Nothing passes between this router and these workers for a while; neither end knows."""
        until_s = self.world.now + duration_s
        for host in hosts:
            self.cut_off_until_s[host.ref] = until_s
            if host.ref in self.links:
                self.links[host.ref].broken_until_s = until_s

    def announce(self, host: Host, load: WorkerLoad) -> bool:
        """False: the worker can never belong here, and must end."""
        if self.world.now < self.cut_off_until_s.get(host.ref, 0.0):
            return True
        worker = self.view.get(host.ref)
        if worker is not None:
            worker.load = load
            return True
        try:
            self.view.register(host.info, self.world.now)
        except BadRequest:
            return False
        self.links[host.ref] = Link(self.world, self, host)
        self.world.num_taken_back += host.ref in self.lost_once
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
        self.lost_once.add(ref)
        self.perform(self.dispatcher.worker_lost(ref, self.world.now))

    def check_prefixes(self) -> None:
        """What the router believes of each cache is so, and of the dead it believes nothing."""
        prefixes = self.view.prefixes
        for ref, link in self.links.items():
            worker = self.view.get(ref)
            assert worker is not None
            known = {key for key, holders in prefixes._holders.items() if holders >> worker.slot & 1}
            cached = set(unpack_keys(pack_keys(link.host.pool.cached_hashes())))
            if known != cached and not link.tail_is_lost:
                raise WrongView(f"{ref}: {len(known)} keys known, {len(cached)} cached")
        slots = [worker.slot for worker in self.view.workers()]
        if any(holders & ~sum(1 << slot for slot in slots) for holders in prefixes._holders.values()):
            raise WrongView("a block is known to be cached by a worker that is gone")

    def report_death(self, ref: WorkerRef) -> None:
        self.view.bury(ref)
        if ref in self.links:
            self.links[ref].cut()
        self.deaths.append(ref)
        for other in self.links.values():
            other.command(PeerDead(ref))

    def tick(self) -> None:
        for link in list(self.links.values()):
            if self.world.now - link.heard_at_s > SILENCE_TIMEOUT_S:
                link.cut()
            elif self.world.now - link.beat_at_s >= HEARTBEAT_S:
                link.heartbeat()
        self.limits.tick()
        self.perform(self.dispatcher.tick(self.world.now))

    def check_hedge(self, request_id: str, *, hedge: bool) -> None:
        """A request has at most two attempts at one thing, on different workers; few have two."""
        legs = self.dispatcher._open.flows[request_id].legs
        self.num_planned += self.dispatcher._open.flows[request_id].num_plans == 1
        self.num_hedges += hedge
        self.world.hedges["begun"] += hedge
        policy = self.dispatcher.planner.routing.hedge
        if not hedge or policy is None:
            return
        places = [ref for leg in legs if leg.plan is not None for ref in leg.plan.workers]
        if len(legs) != 2 or len(places) != len(set(places)) or any(self.clients[request_id].received):
            raise WrongHedge(f"{request_id}: {places}")
        if self.num_hedges > 1 + policy.max_share * self.num_planned:
            raise WrongHedge(f"{self.num_hedges} hedges of {self.num_planned} requests")

    def check_over(self) -> None:
        books = [
            (worker.open_requests, worker.open_tokens, worker.prefills.num_tokens, worker.others.num_tokens)
            for worker in self.view.workers()
        ]
        dispatcher, out = self.dispatcher, self.dispatcher.admission.out
        attempts, backlog = dispatcher._books.attempts, dispatcher.admission.line.backlog
        permits = {**self.limits.own._open, **self.limits.claims.open_names()}
        kept = (dispatcher.num_open, dispatcher.num_queued, attempts, backlog, permits)
        if any(kept) or out != PromptsOut() or any(map(any, books)):
            raise Leak(f"{self.router_id}: {kept} {out} {books}")

    def perform(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(worker, command):
                    if isinstance(command, StartGeneration | ReserveBlocks | StartPrefill):
                        self.world.salts[command.request.request_id] = command.request.cache_salt
                    self.links[worker].command(command)
                case Deliver(request_id, delta, last):
                    self.clients[request_id].deliver(delta, self.world.now)
                    if last:
                        self._over(self.clients[request_id])
                case Fail(request_id, error):
                    self.clients[request_id].fail(error)
                    self._over(self.clients[request_id])
                case RaceEnded(won=won):
                    self.world.hedges["won" if won else "lost"] += 1
                case Planned(request_id, plan=plan, hedge=hedge):
                    self.check_hedge(request_id, hedge=hedge)
                    for ref in {plan.decode, plan.prefiller}:
                        planned = self.view.get(ref)
                        if planned is None or planned.life is not Life.READY:
                            raise PlannedOntoNobody(f"{request_id} onto {ref}: {planned}")
                    client = self.clients[request_id]
                    client.num_migrations += any(client.received)
