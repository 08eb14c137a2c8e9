"""Who goes first, who is preempted, and that nobody waits for ever: time is counted in steps."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import BadRequest
from tests.engine.scheduler_bench import Bench, request
from tests.engine.token_memory import undisturbed


def prompt(number: int, length: int = 8) -> tuple[int, ...]:
    """No two share a prefix."""
    return tuple(range(number * 20, number * 20 + length))


def first_steps(bench: Bench, names: list[str], max_steps: int = 500) -> dict[str, int]:
    """In which step each one was computed first."""
    found: dict[str, int] = {}
    for step in range(max_steps):
        bench.step()
        for name in bench.planned:
            found.setdefault(name, step)
        if len(found) == len(names):
            return found
    raise AssertionError(f"only {found} of {names} in {max_steps} steps")


def test_waiting_requests_start_by_priority_then_by_arrival() -> None:
    bench = Bench(max_sequences=1)
    for number, (name, priority) in enumerate([("b", 1), ("n1", 0), ("n2", 0), ("u1", -1), ("u2", -1), ("bb", 2)]):
        bench.add(request(name, prompt(number), max_tokens=2, priority=priority))
    started = first_steps(bench, ["u1", "u2", "n1", "n2", "b", "bb"])
    assert sorted(started, key=started.__getitem__) == ["u1", "u2", "n1", "n2", "b", "bb"]


@pytest.mark.parametrize("priority", [-101, 101])
def test_a_priority_out_of_range_is_refused_by_name(priority: int) -> None:
    with pytest.raises(BadRequest, match="priority"):
        request("r", range(4), priority=priority)


def test_batch_work_gets_only_the_budget_that_the_rest_leaves() -> None:
    bench = Bench(token_budget=6)
    bench.add(request("batch", prompt(0, 4), max_tokens=30, priority=1))
    bench.step()
    bench.add(request("due", prompt(1, 11), max_tokens=4))
    shares = []
    for _ in range(4):
        plan = bench.scheduler.plan()
        assert plan is not None
        shares.append([(item.request_id, len(item.token_ids)) for item in plan.slices])
        bench.take(bench.scheduler.commit(plan, bench.memory.run(plan)))
    # A decode of batch work too waits for a prompt that is due.
    assert shares[:3] == [[("due", 6)], [("due", 5), ("batch", 1)], [("due", 1), ("batch", 1)]]


def test_a_due_request_that_finds_no_room_takes_it_from_batch_work_the_last_in_line_first() -> None:
    bench = Bench(num_blocks=12, token_budget=32, growth_blocks=0)
    for number, priority in enumerate([1, 2, 1]):
        bench.add(request(f"batch{number}", prompt(number), max_tokens=8, priority=priority))  # 2 blocks, then 4
    for _ in range(3):
        bench.step()
    bench.add(request("due", prompt(9, 15), max_tokens=2))  # 4 blocks
    bench.step()
    assert "due" in bench.planned
    assert "batch1" not in bench.planned and {"batch0", "batch2"} < set(bench.planned)
    bench.run()
    for number in range(3):
        assert bench.outputs[f"batch{number}"] == undisturbed(prompt(number), 8)
    bench.assert_empty()


def test_batch_work_is_not_preempted_for_what_would_not_fit_even_then() -> None:
    bench = Bench(num_blocks=12)
    bench.add(request("long", prompt(0), max_tokens=24))
    bench.add(request("batch", prompt(1), max_tokens=4, priority=1))
    for _ in range(3):
        bench.step()
    bench.add(request("due", prompt(2, 40), max_tokens=2))  # 10 blocks, and `long` holds 3
    bench.step()
    assert "batch" in bench.planned and bench.scheduler.num_preemptions == 0
    bench.run()
    assert bench.outputs["due"] == undisturbed(prompt(2, 40), 2)


def test_a_prefill_for_another_worker_is_not_preempted_it_ends_by_itself() -> None:
    """Its blocks are on their way: preempted, it would push them again."""
    bench = Bench(num_blocks=12, token_budget=8)
    bench.add(request("batch", prompt(0, 24), priority=1), prefill_only=True)
    bench.step()
    bench.add(request("due", prompt(2, 32), max_tokens=1), prefill_only=True)
    handed_over = []
    while progress := bench.step():
        for item in progress:
            if item.handed_over:
                handed_over.append(item.request_id)
                bench.pool.release(item.block_table)
    assert handed_over == ["batch", "due"]
    assert bench.scheduler.num_preemptions == 0
    bench.assert_empty()


def test_of_those_who_are_due_the_lowest_priority_is_preempted_and_then_the_youngest() -> None:
    bench = Bench(num_blocks=8, growth_blocks=0, scan_depth=0)
    for number, priority in enumerate([0, -1, 0]):
        bench.add(request(f"r{number}", prompt(number), max_tokens=16, priority=priority))
    while not bench.scheduler.num_preemptions:
        bench.step()
    assert bench.planned == ["r1", "r0"]
    while bench.scheduler.num_preemptions == 1:
        bench.step()
    assert bench.planned == ["r1"]
    bench.run()
    for number in range(3):
        assert bench.outputs[f"r{number}"] == undisturbed(prompt(number), 16)


@pytest.mark.parametrize(("priority", "ageing_steps"), [(1, 10), (3, 10), (2, 25)])
def test_batch_work_starts_in_bounded_time_under_a_flood_of_due_work(priority: int, ageing_steps: int) -> None:
    """Every step brings as much due work as a step computes; the batch request ages meanwhile."""
    bench = Bench(token_budget=8, ageing_steps=ageing_steps)
    bench.add(request("first", prompt(1000), max_tokens=1))
    bench.add(request("batch", prompt(1001), max_tokens=1, priority=priority))
    for step in range(1000):
        bench.add(request(f"due{step}", prompt(step), max_tokens=1))
        bench.step()
        if "batch" in bench.planned:
            break
    assert priority * ageing_steps <= step <= priority * ageing_steps + 2
    bench.run()


def test_a_flood_of_urgent_work_holds_the_rest_up_for_a_bounded_time() -> None:
    bench = Bench(token_budget=8, ageing_steps=10)
    bench.add(request("first", prompt(1000), max_tokens=1, priority=-4))
    bench.add(request("plain", prompt(1001), max_tokens=1))
    for step in range(1000):
        bench.add(request(f"urgent{step}", prompt(step), max_tokens=1, priority=-4))
        bench.step()
        if "plain" in bench.planned:
            break
    assert step <= 4 * 10 + 2
    bench.run()


def test_running_batch_work_that_is_starved_of_budget_becomes_due_and_served_steps_do_not_count() -> None:
    bench = Bench(token_budget=8, ageing_steps=20)
    bench.add(request("batch", prompt(1001), max_tokens=80, priority=1))
    for _ in range(30):
        bench.step()
        assert bench.planned == ["batch"]  # alone, and no nearer to being due
    passed_over = 0
    for step in range(60):
        bench.add(request(f"due{step}", prompt(step), max_tokens=1))
        bench.step()
        passed_over += "batch" not in bench.planned
    assert passed_over == 20
    assert "batch" in bench.planned
    bench.run()
    assert bench.outputs["batch"] == undisturbed(prompt(1001), 80)


def test_batch_work_that_is_preempted_again_and_again_still_ends() -> None:
    """Due work that always fills the pool comes without end."""
    bench = Bench(num_blocks=6, ageing_steps=10)
    bench.add(request("batch", prompt(1000), max_tokens=12, priority=1))
    for step in range(200):
        if step % 3 == 0:
            bench.add(request(f"due{step}", prompt(step, 16), max_tokens=2))
        bench.step()
        if "batch" in bench.finished:
            break
    assert bench.scheduler.num_preemptions > 1
    assert bench.outputs["batch"] == undisturbed(prompt(1000), 12)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_any_mix_of_priorities_says_what_each_says_alone(seed: int) -> None:
    """Random arrivals, pools too small for all, any reserve, scan and ageing: all end, and say the same."""
    rng = random.Random(seed)
    bench = Bench(
        num_blocks=rng.randrange(12, 40),
        token_budget=rng.choice([1, 2, 5, 16, 64]),
        max_sequences=rng.choice([1, 3, 64]),
        ageing_steps=rng.choice([1, 5, 500]),
        growth_blocks=rng.randrange(3),
        scan_depth=rng.randrange(3),
        max_overtakes=rng.randrange(3),
    )
    wanted = {f"r{number}": (prompt(number, rng.randrange(1, 20)), rng.randrange(1, 20)) for number in range(12)}
    waiting = list(wanted)
    for _ in range(3000):
        if waiting and rng.random() < 0.3:
            name = waiting.pop()
            priority = rng.choice([-100, -1, 0, 0, 1, 2, 100])
            bench.add(request(name, wanted[name][0], max_tokens=wanted[name][1], priority=priority))
        if not bench.step() and not waiting:
            break
    bench.assert_empty()
    assert {name: bench.outputs[name] for name in wanted} == {name: undisturbed(*what) for name, what in wanted.items()}
