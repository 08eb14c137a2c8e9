"""Requests whose prompts end every worker that computes them, in clusters with too little room: they are stopped, and
no other request fails, whoever waited, was overtaken, preempted or moved beside them.

A failing seed is reproduced by `TANDEM_SEED=N pytest tests/simulation/test_poison_world.py`.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from cluster.worker.router_streams import RouterStreams
from core.errors import WorkerLost
from engine.step import Drawn, StepPlan
from router.config import DispatcherConfig
from router.view import ClusterView
from tests.simulation.cluster_world import NO_FAULTS, World
from tests.simulation.world_client import WrongStream
from tests.simulation.world_host import Host

NUM_SEEDS = 12
NUM_REQUESTS = 40
MOST = DispatcherConfig().max_silent_failures


class PoisonWorld(World):
    """What a worker has written before it dies is read."""

    num_blocks = 24
    restart_s = (0.2, 0.4)

    def __init__(self, seed: int) -> None:
        self.num_kills: Counter[str] = Counter()  # by request id
        super().__init__(seed, NO_FAULTS, priorities=(0, 0, 1), dispatch=DispatcherConfig())

    def kill(self, host: Host) -> None:
        links, host.links = host.links, {}
        super().kill(host)
        for link in links:
            link._deliver("up", link.cut)


def is_poison(request_id: str) -> bool:
    return int(request_id[1:]) % 10 == 3


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = Host.compute

    def compute_or_die(self: Host, plan: StepPlan) -> list[tuple[Drawn, ...]]:
        killers = [name for name in sorted(it.partition("#")[0] for it in plan.prompts) if is_poison(name)]
        if not killers:
            return compute(self, plan)
        assert isinstance(self.world, PoisonWorld)
        self.world.num_kills[killers[0]] += 1
        self.world.kill(self)
        return []

    monkeypatch.setattr(Host, "compute", compute_or_die)


def walk(seed: int) -> PoisonWorld:
    world = PoisonWorld(seed)
    try:
        world.run(NUM_REQUESTS)
        for client in world.clients:
            poison = is_poison(client.request.request_id)
            assert isinstance(client.error, WorkerLost if poison else type(None)), client.request.request_id
        assert max(world.num_kills.values()) <= 3 * MOST, world.num_kills  # they excuse each other
    except BaseException as error:
        error.add_note(f"reproduce: TANDEM_SEED={seed} pytest tests/simulation/test_poison_world.py")
        raise
    return world


def test_who_kills_is_stopped_and_nobody_else() -> None:
    chosen = os.environ.get("TANDEM_SEED")
    for seed in [int(chosen)] if chosen else range(NUM_SEEDS):
        assert walk(seed).num_kills


@pytest.mark.parametrize("owner", [RouterStreams, ClusterView])
def test_it_is_seen_when_workers_do_not_say_whom_they_compute(owner: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or when routers do not hear it: then they guess."""
    monkeypatch.setattr(owner, "computes", lambda *_arguments: [])
    with pytest.raises((AssertionError, WrongStream)):
        for seed in range(NUM_SEEDS):
            walk(seed)
