"""One router of tests/simulation/cluster_world.py, and its streams to workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from cluster.worker.router_streams import RouterStream
from core.blocks import CacheTier
from core.errors import BadRequest, Rejected
from core.identity import pack_keys, unpack_keys
from core.membership import Life, WorkerLoad, WorkerRef
from core.messages import (
    Answer,
    CacheEvents,
    Command,
    PeerDead,
    PeerJoined,
    ReserveBlocks,
    StartGeneration,
    StartPrefill,
    StepOutput,
)
from core.request import Placement
from router.admission.limits import Permit
from router.admission.room import PromptsOut
from router.dispatcher import Dispatcher
from router.effects import Deliver, Effect, Fail, Planned, RaceEnded, Send
from router.policy.prompt_keys import prompt_keys
from router.policy.routing_policy import RoutingPolicy
from router.prefix_view import PrefixView
from router.view import ClusterView
from tests.simulation.world_client import Client
from tests.simulation.world_host import Host
from tests.simulation.world_limits import Asking, Leak, RouterLimits

if TYPE_CHECKING:
    from tests.simulation.cluster_world import World

SILENCE_TIMEOUT_S = 4.0
HEARTBEAT_S = 1.5


class PlannedOntoNobody(Exception):
    """A router plans onto a worker of which it knows that it is not ready."""


class WrongHedge(Exception):
    """A second attempt that there must not be."""


class WrongView(Exception):
    """The router believes what is not so, long after it was told."""


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
            slot = worker.slot
            known = {key: tier_of(prefixes, key, slot) for key, bits in prefixes._holders.items() if bits >> slot & 1}
            pool = link.host.pool
            places = {block_hash: pool.place(block_hash) for block_hash in pool.all_hashes()}
            cached = dict(zip(unpack_keys(pack_keys(places)), places.values(), strict=True))
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
            (worker.open_tokens, worker.prefills.num_tokens, worker.others.num_tokens) for worker in self.view.workers()
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


def tier_of(prefixes: PrefixView, key: int, slot: int) -> CacheTier:
    """Where a router believes that a worker has a block, of which it believes that it has it."""
    for tier, holders in ((CacheTier.HOST, prefixes._host), (CacheTier.DISK, prefixes._disk)):
        if holders.get(key, 0) >> slot & 1:
            return tier
    return CacheTier.DEVICE
