"""Prompts that wait for each other while others decode: fewer steps carry prompts, and none waits beyond the bound."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import BadRequest
from engine.scheduler_config import SchedulerConfig
from tests.engine.scheduler_bench import Bench, request
from tests.engine.token_memory import undisturbed


def bench_that_decodes(delay_steps: int, **settings) -> Bench:
    """One request decodes for as long as a test looks."""
    bench = Bench(num_blocks=400, prefill_delay_steps=delay_steps, **settings)
    bench.add(request("decodes", range(900, 904), max_tokens=200))
    bench.step()
    return bench


def prompt(number: int, length: int = 4) -> tuple[int, ...]:
    return tuple(range(number * 20, number * 20 + length))


def walk(delay_steps: int, num_requests: int = 12) -> tuple[list[int], Bench]:
    """A short prompt comes before each step; returns in which steps prompts were computed."""
    bench, prefills = bench_that_decodes(delay_steps, token_budget=64), []
    for step in range(3 * num_requests):
        if step < num_requests:
            bench.add(request(f"r{step}", prompt(step), max_tokens=100))
        before = set(bench.outputs)
        bench.step()
        if set(bench.outputs) - before:
            prefills.append(step)
    return prefills, bench


def test_no_prompt_waits_unless_asked() -> None:
    assert SchedulerConfig().prefill_delay_steps == 0
    prefills, _bench = walk(0)
    assert prefills == list(range(12))


@pytest.mark.parametrize(("delay_steps", "expected"), [(1, [1, 3, 5, 7, 9, 11]), (3, [3, 7, 11]), (5, [5, 11])])
def test_prompts_are_computed_together_after_the_bound(delay_steps: int, expected: list[int]) -> None:
    """With a bound of D steps, D + 1 prompts share one step where each had one."""
    prefills, bench = walk(delay_steps)
    assert prefills == expected
    bench.run()
    for number in range(12):
        assert bench.outputs[f"r{number}"] == undisturbed(prompt(number), 100)


def test_a_prompt_waits_only_beside_decodes() -> None:
    bench = Bench(prefill_delay_steps=50)
    bench.add(request("alone", prompt(0)))
    bench.step()
    assert bench.planned == ["alone"]


def test_prompts_that_fill_the_step_do_not_wait() -> None:
    bench = bench_that_decodes(50, token_budget=16)
    bench.add(request("small", prompt(0, 7)))
    bench.step()
    assert bench.planned == ["decodes"]
    bench.add(request("more", prompt(1, 8)))  # with "small" the 15 tokens that the decode leaves
    bench.step()
    assert bench.planned == ["decodes", "small", "more"]


def test_a_prompt_joins_one_that_is_under_way() -> None:
    bench = bench_that_decodes(50, token_budget=16)
    bench.add(request("long", prompt(0, 20)))
    bench.step()
    assert bench.planned == ["decodes", "long"]
    bench.add(request("joins", prompt(1)))
    bench.step()
    assert bench.planned == ["decodes", "long", "joins"]


def test_due_prompts_do_not_wait_for_batch_work_that_decodes() -> None:
    bench = Bench(prefill_delay_steps=50)
    bench.add(request("batch", prompt(0), max_tokens=100, priority=5))
    bench.step()
    bench.add(request("due", prompt(1)))
    bench.step()
    assert bench.planned[0] == "due"


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_nobody_waits_longer_than_the_bound_where_there_is_room(seed: int) -> None:
    """Whatever comes after it, of whatever priority: the age of all who wait counts, not the head's alone."""
    rng = random.Random(seed)
    delay_steps = rng.randrange(1, 8)
    bench = bench_that_decodes(delay_steps, token_budget=rng.choice([64, 256]))
    arrived, started = {}, {}
    for step in range(60):
        for _ in range(rng.choice([0, 0, 1, 2])):
            name = f"r{len(arrived)}"
            bench.add(request(name, prompt(len(arrived), rng.randrange(1, 6)), 3, priority=rng.choice([-2, 0, 0])))
            arrived[name] = step
        bench.step()
        for name in bench.planned:
            started.setdefault(name, step)
    late = {name: started.get(name, 60) - step for name, step in arrived.items()}
    assert all(waited <= delay_steps for name, waited in late.items() if arrived[name] + delay_steps < 60), late


def test_a_bound_below_zero_is_refused_by_name() -> None:
    with pytest.raises(BadRequest, match="prefill_delay_steps"):
        SchedulerConfig(prefill_delay_steps=-1)
