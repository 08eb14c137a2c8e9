"""Workers that are killed faster than they come back, under a steady load: none fails, and none waits for ever.

What keeps the workers is the real Fleet, with its stand-ins and back-offs. A killed worker is back after 6 to 14 s, and
prompts of all streams that it had take seconds to compute again, as in tests/acceptance/kill_soak.py on two cores.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, replace

from cluster.fleet import Fleet
from cluster.fleet_events import (
    EndWorker,
    Event,
    ForgetWorker,
    StartWorker,
    SwitchRole,
    Wake,
    WakeAt,
    WorkerDied,
    WorkerStarted,
)
from core.membership import Role, WorkerRef
from core.request import GenerateRequest, SamplingParams, StopConditions
from engine.step import StepPlan
from router.config import DispatcherConfig
from tests.simulation.cluster_world import NO_FAULTS, World
from tests.simulation.world_client import Client
from tests.simulation.world_host import Host

NUM_STREAMS = 16
KILL_EVERY_S = 5.0
REST_S = 90.0
PLACES = {"p0": Role.PREFILL, "p1": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE}
SWITCH_TIMEOUT_S = 5.0


class KillWorld(World):
    """Its keeper stands in for cluster/controller.py."""

    num_blocks = 400

    def __init__(self, seed: int, kills_s: float, *, stand_in: bool) -> None:
        self.fleet = Fleet(PLACES, random.Random(seed), stand_in=stand_in)
        self._draw = random.Random(seed)
        self._open: list[Client | None] = [None] * NUM_STREAMS
        self._kills_s = kills_s
        self._begun = False
        self.num_switches = 0
        super().__init__(seed, replace(NO_FAULTS, late_s=0.02), dispatch=DispatcherConfig(tokens_ahead=32))
        for kill in range(1, int(kills_s / KILL_EVERY_S) + 1):
            self.at(kill * KILL_EVERY_S, self.kill_one)
        self.at(1.0, self.refill)

    def step_s(self, plan: StepPlan) -> float:
        return 0.02 + 0.01 * plan.num_tokens

    def start(self, _place: str) -> None:
        """All at once; later lives are the fleet's to start."""
        if not self._begun:
            self._begun = True
            self.keep(Wake())

    def keep(self, event: Event) -> None:
        for effect in self.fleet.step(event, self.now):
            match effect:
                case StartWorker(ref, role):
                    delay_s = self._draw.uniform(6.0, 14.0) if self.now else 0.0
                    self.at(delay_s, lambda ref=ref, role=role: self.begin(ref, role))  # type: ignore[misc]
                case SwitchRole(ref, to):
                    self.num_switches += 1
                    self.switch(ref, to)
                case ForgetWorker(ref):
                    self.at(self._draw.uniform(0.1, 1.0), lambda ref=ref: self.report_death(ref))  # type: ignore[misc]
                case WakeAt(at_s):
                    self.at(at_s - self.now, lambda: self.keep(Wake()))
                case EndWorker():
                    raise AssertionError("nobody stops")

    def begin(self, ref: WorkerRef, role: Role) -> None:
        self.hosts[ref.worker_id] = Host(self, ref, role)
        self.keep(WorkerStarted(ref))

    def switch(self, ref: WorkerRef, to: Role) -> None:
        def ended(outcome: str) -> None:
            self.fleet.drained(ref, to, done=not outcome)
            self.at(1.0 if outcome else 0.0, lambda: self.keep(Wake()))

        host = self.hosts[ref.worker_id]
        host.do(lambda: host.drain(2.0, SWITCH_TIMEOUT_S, to, ended))

    def kill(self, host: Host) -> None:
        host.alive = False
        for link in list(host.links):
            self.at(self.late(), link.cut)
        self.at(self.late(), lambda: self.keep(WorkerDied(host.ref, "killed")))

    def kill_one(self) -> None:
        serving = [host for host in self.hosts.values() if host.alive and host.links]
        if serving:
            self.kill(self._draw.choice(serving))

    def refill(self) -> None:
        """Each stream asks again once it is over."""
        for number, client in enumerate(self._open):
            if (client is None or client.over) and self.now < self._kills_s:
                prompt = tuple(self._draw.randrange(1000) for _ in range(self._draw.choice((3, 6, 9, 15, 40))))
                stop = StopConditions(max_tokens=self._draw.randrange(5, 20))
                request = GenerateRequest(f"r{len(self.clients)}", prompt, SamplingParams(0.0), stop)
                self._open[number] = self.ask(self.routers[0], request)
        self.at(0.25, self.refill)


@dataclass(frozen=True, slots=True)
class Waits:
    failed: list[str]
    first_s: float
    gap_s: float
    num_requests: int
    num_switches: int


def walk(seed: int, kills_s: float, *, stand_in: bool) -> Waits:
    world = KillWorld(seed, kills_s, stand_in=stand_in)
    world.run_until(kills_s + REST_S)
    world.check_over()
    assert {place: host.role.role for place, host in world.hosts.items()} == PLACES
    return Waits(
        [str(client.error) for client in world.clients if client.error is not None],
        max(client.first_s - client.submitted_s for client in world.clients),
        max(client.longest_gap_s for client in world.clients),
        len(world.clients),
        world.num_switches,
    )


def test_none_fails_and_none_waits_for_a_worker_to_start() -> None:
    """The control: without stand-ins they wait until a decode worker is back, or longer."""
    waits, without = walk(4, 60.0, stand_in=True), walk(4, 60.0, stand_in=False)
    assert not waits.failed and waits.num_switches
    assert max(waits.first_s, waits.gap_s) < 9.0 < max(without.first_s, without.gap_s)


if __name__ == "__main__":
    for number in map(int, sys.argv[1:]):
        for stands_in in (False, True):
            print(number, walk(number, 120.0, stand_in=stands_in), flush=True)
