"""Prompts beside decodes: a step takes at most so many times as long as its decodes alone would."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import BadRequest
from engine.scheduler_config import SchedulerConfig
from engine.step import StepPlan
from engine.step_pace import GOOD_FOR_STEPS, LEAST_TOKENS, OFF, StepPace
from tests.engine.scheduler_bench import Bench, request
from tests.engine.token_memory import undisturbed

FIXED_S, DECODE_S, TOKEN_S = 0.008, 0.002, 0.001


def duration_s(plan: StepPlan) -> float:
    """What a machine would take whose costs are plain."""
    return FIXED_S + DECODE_S * plan.num_decodes + TOKEN_S * (plan.num_tokens - plan.num_decodes)


def step(bench: Bench) -> StepPlan:
    plan = bench.scheduler.plan()
    assert plan is not None
    bench.take(bench.scheduler.commit(plan, bench.memory.run(plan), duration_s(plan)))
    return plan


def serve_beside(num_decodes: int, max_slowdown: float) -> tuple[Bench, list[StepPlan]]:
    """A prompt of 400 tokens comes while others decode; returns the steps from then on until it has its first token."""
    bench = Bench(num_blocks=2000, token_budget=256, max_decode_slowdown=max_slowdown)
    for number in range(num_decodes):
        bench.add(request(f"d{number}", range(100 * number, 100 * number + 40), max_tokens=300))
    while step(bench).num_decodes < num_decodes:
        pass
    bench.add(request("long", range(5000, 5400), max_tokens=4))
    steps = []
    while "long" not in bench.outputs:
        steps.append(step(bench))
    return bench, steps


@pytest.mark.parametrize("num_decodes", [1, 5, 20])
@pytest.mark.parametrize("max_slowdown", [1.5, 2.0, 4.0])
def test_no_step_passes_the_bound_and_the_answers_are_the_same(num_decodes: int, max_slowdown: float) -> None:
    bench, steps = serve_beside(num_decodes, max_slowdown)
    alone_s = FIXED_S + DECODE_S * num_decodes
    allowed_s = max(max_slowdown * alone_s, alone_s + TOKEN_S * LEAST_TOKENS)
    # The first estimate of a token's cost comes from prompts that were computed alone, with the step's fixed cost.
    assert max(map(duration_s, steps)) <= 1.05 * allowed_s
    assert all(plan.num_decodes == num_decodes for plan in steps)
    bench.run()
    assert bench.outputs["long"] == undisturbed(tuple(range(5000, 5400)), 4)


def test_without_a_bound_the_prompt_takes_the_whole_budget() -> None:
    _bench, steps = serve_beside(5, math.inf)
    assert [plan.num_tokens for plan in steps] == [256, 154]


@pytest.mark.parametrize(("max_slowdown", "prompt_tokens"), [(OFF, 255), (2.0, 0)])
def test_only_a_bound_costs_a_step_without_prompts(max_slowdown: float, prompt_tokens: int) -> None:
    """In it is learnt what decodes alone take."""
    bench = Bench(num_blocks=2000, token_budget=256, max_decode_slowdown=max_slowdown)
    bench.add(request("d", range(40), max_tokens=300))
    step(bench)
    bench.add(request("long", range(5000, 5400), max_tokens=4))
    plan = step(bench)
    assert (plan.num_decodes, plan.num_tokens - plan.num_decodes) == (1, prompt_tokens)


def test_the_room_that_the_bound_leaves_is_used() -> None:
    _bench, steps = serve_beside(20, 2.0)
    tokens = [plan.num_tokens - plan.num_decodes for plan in steps[:-1]]
    assert min(tokens[-3:]) >= 0.8 * (FIXED_S + 20 * DECODE_S) / TOKEN_S


def test_batch_work_gets_its_share_of_the_same_bound() -> None:
    """Prompts of both kinds count together, and batch decodes go on."""
    bench = Bench(num_blocks=2000, token_budget=256, max_decode_slowdown=2.0)
    bench.add(request("due", range(40), max_tokens=300))
    bench.add(request("batch", range(100, 140), max_tokens=300, priority=5))
    while step(bench).num_decodes < 2:
        pass
    bench.add(request("due prompt", range(1000, 1400), max_tokens=1))
    bench.add(request("batch prompt", range(2000, 2400), max_tokens=1, priority=5))
    while "batch prompt" not in bench.outputs:
        plan = step(bench)
        assert plan.num_decodes == 2
        assert duration_s(plan) <= 2.1 * max(FIXED_S + 2 * DECODE_S, TOKEN_S * LEAST_TOKENS)


def test_the_time_of_decodes_alone_is_measured_once_for_a_size_and_again_when_it_is_old() -> None:
    pace = StepPace(2.0)
    assert pace.prompt_tokens_beside(5) == 0
    pace.learn(0.02, 0, 5)
    pace.learn(0.1, 100, 0)
    assert pace.prompt_tokens_beside(5) == 20
    assert pace.prompt_tokens_beside(6) == 0
    for _ in range(GOOD_FOR_STEPS - 2):
        pace.learn(0.02, 1, 5)
    assert pace.prompt_tokens_beside(5) == 20
    pace.learn(0.02, 1, 5)
    assert pace.prompt_tokens_beside(5) == 0


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(0, 300), st.integers(0, 40)), max_size=50), st.integers(1, 40))
def test_whatever_was_measured_a_prompt_goes_on_after_one_step(steps: list[tuple[float, int, int]], count: int) -> None:
    """Also where a clock stood still: nobody starves."""
    pace = StepPace(1.5)
    for duration, num_prompt_tokens, num_decodes in steps:
        pace.learn(duration, num_prompt_tokens, num_decodes)
    if pace.prompt_tokens_beside(count) == 0:
        pace.learn(0.01, 0, count)
    assert pace.prompt_tokens_beside(count) >= LEAST_TOKENS


@pytest.mark.parametrize("bound", [1.0, 0.0, float("nan")])
def test_a_bound_that_leaves_nothing_is_refused_by_name(bound: float) -> None:
    with pytest.raises(BadRequest, match="max_decode_slowdown"):
        SchedulerConfig(max_decode_slowdown=bound)


@pytest.mark.parametrize("seed", range(20))
def test_a_prompt_starves_in_no_mix(seed: int) -> None:
    """More decodes than a step takes, batch work, small pools: the sizes of steps are not those that were measured."""
    rng = random.Random(seed)
    bench = Bench(
        num_blocks=rng.choice([30, 60, 400]),
        token_budget=rng.choice([4, 8, 64]),
        max_sequences=rng.choice([3, 6, 40]),
        max_decode_slowdown=1.2,
    )
    lengths = [rng.randrange(1, 40) for _ in range(14)]
    for number, length in enumerate(lengths):
        bench.add(request(f"r{number}", range(100 * number, 100 * number + length), 20, priority=rng.choice([0, 0, 3])))
        step(bench)
    num_steps = 0
    while len(bench.finished) < len(lengths):
        step(bench)
        num_steps += 1
        assert num_steps < 2000
    for number, length in enumerate(lengths):
        assert bench.outputs[f"r{number}"] == undisturbed(tuple(range(100 * number, 100 * number + length)), 20)
    bench.assert_empty()
