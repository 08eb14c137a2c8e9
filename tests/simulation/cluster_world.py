"""A whole cluster on virtual time: clients, routers, workers, keeper, index and the server of shared limits, with every
fault they have.

The quiet code is the real one: Dispatcher, ClusterView, RouterStreams, both role sessions, HandoffSessions, Scheduler
and BlockPool. What stands around it here stands in for router/live.py, cluster/worker/process.py, kv_transfer/driver.py
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
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from core.errors import Rejected, RejectReason
from core.identity import Adapter, BlockHash
from core.membership import Role, WorkerRef
from core.messages import (
    RefuseReason,
)
from core.request import GenerateRequest, Placement, SamplingParams, StopConditions
from engine.step import StepPlan
from router.admission.policy import AdmissionPolicy
from router.config import DispatcherConfig
from router.policy.routing_policy import RoutingPolicy
from tests.simulation.chained_kv import NUM_BLOCKS, undisturbed
from tests.simulation.world_client import Client, WrongStream
from tests.simulation.world_host import Host
from tests.simulation.world_limits import TENANTS, Leak, SharedServer
from tests.simulation.world_router import Router

# Attempts run out more often than in production, and no hang ends by the time limit.
DISPATCH = DispatcherConfig(max_open_requests=64, queue_timeout_s=15.0, max_silent_failures=2, request_timeout_s=1000.0)
FAULTS_END_S = 25.0
END_S = 90.0  # by then every request must be over: each lease and bounded wait has passed


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

    num_blocks = NUM_BLOCKS  # of each worker
    restart_s = (0.5, 2.0)  # from a death until the next life begins

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
        adapters: tuple[Adapter | None, ...] = (None,),
        tiers: tuple[int, int] = (0, 0),
    ):
        self.rng = random.Random(seed)
        self.faults = faults
        self.priorities = priorities  # given to requests in turn, and so are numbers of choices, and adapters
        self.choices = choices
        self.adapters = adapters
        self.tiers = tiers  # slots of host memory and disk below each worker's pool
        self.tier_rng = random.Random(f"tiers {seed}")  # so that a world without is as it was
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

    def step_s(self, _plan: StepPlan) -> float:
        """How long a worker takes for a step."""
        return self.rng.uniform(0.02, 0.2)

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
            adapter=self.adapters[number % len(self.adapters)],
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
        self.at(self.rng.uniform(*self.restart_s), lambda: self.start(host.ref.worker_id))

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
