"""A prefill worker that is slow for a while and then recovers: it is left alone while it is slow, not for ever."""

from __future__ import annotations

from collections import Counter

import pytest

from core.request import GenerateRequest, Placement, SamplingParams, StopConditions
from router.effects import Planned
from router.policy import pace
from router.policy.pace import MEMORY_S
from tests.simulation.cluster_world import NO_FAULTS, World

SEEDS = (0, 7)
SLOWNESS = 16.0
RECOVERS_S = 20.0
TRIED_S = RECOVERS_S + 2 * MEMORY_S
END_S = TRIED_S + 40.0
EVERY_S = 0.4


class SlowWorld(World):
    """Prompts that nobody caches, more than one prefill worker computes at once."""

    def __init__(self, seed: int, slowness: float) -> None:
        super().__init__(seed, NO_FAULTS)
        self.planned: list[tuple[float, str]] = []
        self.hosts["p0"].slow_down(slowness, RECOVERS_S)
        (router,) = self.routers
        assert router is not None
        perform = router.perform

        def watch(effects: list[object]) -> None:
            effects = list(effects)
            self.planned += [
                (self.now, effect.plan.prefiller.worker_id) for effect in effects if isinstance(effect, Planned)
            ]
            perform(effects)

        router.perform = watch  # type: ignore[assignment, method-assign]
        for number in range(int((END_S - 10.0) / EVERY_S)):
            self.at(2.0 + number * EVERY_S, lambda number=number: self.send(number))

    def send(self, number: int) -> None:
        prompt = tuple(1000 + 50 * number + position for position in range(45))
        request = GenerateRequest(f"r{number}", prompt, SamplingParams(0.0), StopConditions(max_tokens=1))
        self.ask(self.routers[0], request, Placement.REMOTE)

    def share_of_p0(self, begin_s: float, end_s: float) -> float:
        seen = Counter(name for at_s, name in self.planned if begin_s <= at_s < end_s)
        return seen["p0"] / seen.total()


def walk(seed: int, slowness: float) -> SlowWorld:
    world = SlowWorld(seed, slowness)
    world.run_until(END_S)
    return world


@pytest.mark.parametrize("seed", SEEDS)
def test_a_worker_that_recovers_gets_its_share_again(seed: int) -> None:
    never, slow = walk(seed, 1.0), walk(seed, SLOWNESS)
    slow.check_over()
    assert slow.share_of_p0(8.0, RECOVERS_S) < 0.5 * never.share_of_p0(8.0, RECOVERS_S)
    assert slow.share_of_p0(TRIED_S, END_S) > 0.7 * never.share_of_p0(TRIED_S, END_S)


def test_without_fading_it_would_get_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "MEMORY_S", 1e12)
    assert walk(SEEDS[0], SLOWNESS).share_of_p0(TRIED_S, END_S) == 0.0
