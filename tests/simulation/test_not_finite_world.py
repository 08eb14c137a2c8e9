"""Clusters whose model comes to a NaN for some tokens: their requests end with an error, and nothing is told of them.

A failing seed is reproduced by `TANDEM_SEED=N pytest tests/simulation/test_not_finite_world.py`.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace

import pytest

from core.errors import TandemError
from core.request import FinishReason, TokenDelta
from engine.sequence import Sequence
from engine.step import NOT_FINITE, PROBE, Drawn, SequenceSlice, StepPlan
from tests.simulation.cluster_world import NO_FAULTS, Faults, World
from tests.simulation.world_client import Client, WrongStream
from tests.simulation.world_host import Host

NUM_SEEDS = 20
CHOICES = (1, 3, 1, 1, 2)


def is_poison(token: int) -> bool:
    """One of the prefixes that requests share has it, and one in fifty of all other tokens is one."""
    return token == 130 or token % 50 == 49


class ModelFailed(TandemError):
    """What the front would raise."""


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Slices of each request that came to a NaN: any that computes a poisonous token. One that reads the KV of such a
    token instead, from a cache or a peer, goes on, and so does its stream, which is seen."""
    seen: Counter[str] = Counter()
    compute, deliver = Host.compute, Client.deliver

    def compute_poison(self: Host, plan: StepPlan) -> list[tuple[Drawn, ...]]:
        answers = compute(self, plan)
        for index, item in enumerate(plan.slices):
            if any(map(is_poison, item.token_ids)):
                answers[index] = (NOT_FINITE,) * len(item.samples)
                seen[item.request_id.partition("#")[0]] += 1
        return answers

    def deliver_poison(self: Client, delta: TokenDelta, now: float) -> None:
        tokens = [*self.request.prompt_token_ids, *self.received[delta.choice]]
        if delta.finish_reason is FinishReason.ERROR:
            assert any(map(is_poison, tokens)) and delta.message == NOT_FINITE.message
            if not self.left:
                self.fail(ModelFailed(delta.message))
        elif any(map(is_poison, tokens)):
            raise WrongStream(f"{self.request.request_id} goes on after a NaN: {delta}")
        else:
            deliver(self, delta, now)

    monkeypatch.setattr(Host, "compute", compute_poison)
    monkeypatch.setattr(Client, "deliver", deliver_poison)
    return seen


def walk(seed: int, faults: Faults) -> World:
    world = World(seed, faults, choices=CHOICES)
    try:
        world.run(25)
    except BaseException as error:
        error.add_note(f"reproduce: TANDEM_SEED={seed} pytest tests/simulation/test_not_finite_world.py")
        raise
    return world


def failed(world: World) -> list[Client]:
    return [client for client in world.clients if isinstance(client.error, ModelFailed)]


@pytest.mark.usefixtures("computed")
def test_under_every_fault_a_poisoned_request_ends_with_an_error_and_the_others_say_what_they_say() -> None:
    chosen = os.environ.get("TANDEM_SEED")
    seen: Counter[str] = Counter()
    for seed in [int(chosen)] if chosen else range(NUM_SEEDS):
        world = walk(seed, Faults())
        for client in failed(world):
            seen["before a token" if client.num_received == 0 else "later"] += 1
            seen["choices"] += len(client.expected) > 1
            seen["migrated"] += client.num_migrations > 0
        seen["finished"] += sum(client.finished for client in world.clients)
    assert chosen or all(seen[way] for way in ("before a token", "later", "choices", "migrated", "finished")), seen


def test_without_faults_it_is_computed_once(computed: Counter[str]) -> None:
    """Not again on another worker, nor on the decode worker what the prefill worker could not."""
    for seed in range(4):
        computed.clear()
        world = walk(seed, NO_FAULTS)
        assert failed(world)
        for client in failed(world):
            assert 1 <= computed[client.request.request_id] <= len(client.expected)


@pytest.mark.usefixtures("computed")
def test_it_is_seen_when_only_the_end_of_a_prompt_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then blocks that hold a NaN are cached, and sent away."""
    slice_of = Sequence.slice

    def without_probe(self: Sequence, num_tokens: int) -> SequenceSlice:
        item = slice_of(self, num_tokens)
        return replace(item, samples=tuple(spec for spec in item.samples if spec is not PROBE))

    monkeypatch.setattr(Sequence, "slice", without_probe)
    with pytest.raises(WrongStream, match="goes on after a NaN"):
        for seed in range(NUM_SEEDS):
            walk(seed, Faults())
