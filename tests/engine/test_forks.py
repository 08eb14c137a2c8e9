"""One prompt, several choices: equal to as many single requests, for exactly the blocks that they cannot share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.blocks import num_blocks_for
from core.errors import BadRequest
from core.request import MAX_CHOICES, FinishReason, GenerateRequest, SamplingParams, StopConditions
from engine.growth import BlockGrowth
from engine.scheduler import Scheduler
from engine.step import Drawn, Progress, StepPlan
from tests.engine.scheduler_bench import BLOCK_SIZE, Bench
from tests.engine.scheduler_walk import SAMPLED, land, request, singles, walk
from tests.engine.token_memory import SharedWrite, TokenMemory, undisturbed

GOLDEN_FILE = Path(__file__).parent.parent / "golden" / "smollm2_135m_greedy.json"


def land_in_part(bench: Bench, wanted: GenerateRequest) -> bool:
    return land(bench, wanted, num_damaged=2)


@pytest.mark.parametrize("budget", [1, 3, 64])
@pytest.mark.parametrize("length", [3, 4, 9, 12])
@pytest.mark.parametrize("start", [Bench.add, land, land_in_part])
def test_choices_say_what_single_requests_with_their_seeds_say(
    start: Callable[[Bench, GenerateRequest], None], length: int, budget: int
) -> None:
    bench = Bench(token_budget=budget)
    wanted = request("r", range(length))
    start(bench, wanted)
    bench.run()
    assert bench.outputs == singles(wanted)
    assert len({tuple(output) for output in bench.outputs.values()}) == 4
    assert bench.outputs["r"] == undisturbed(tuple(range(length)), 8, seed=SAMPLED.seed)  # as with one choice
    bench.assert_empty()


def test_greedy_choices_are_equal_and_become_findable_once() -> None:
    bench = Bench()
    stop = StopConditions(max_tokens=9)
    bench.add(GenerateRequest("r", tuple(range(6)), SamplingParams(0.0), stop, num_choices=3))
    bench.run()
    expected = undisturbed(tuple(range(6)), 9)
    assert bench.outputs == {"r": expected, "r/1": expected, "r/2": expected}
    assert len(bench.pool.cached_hashes()) == (6 + 9 - 1) // BLOCK_SIZE


@pytest.mark.parametrize("prompt", [4, 7, 8, 9, 40])
@pytest.mark.parametrize("output", [1, 2, 5, 13])
@pytest.mark.parametrize("num_choices", [1, 2, 5])
def test_choices_hold_what_they_cannot_share_and_not_a_block_more(prompt: int, output: int, num_choices: int) -> None:
    """n choices of P prompt tokens, t tokens each so far, hold P // B + n * (blocks for t - P // B) blocks, and n
    requests n * (blocks for t): the prompt's full blocks are saved n - 1 times, and its computation as well."""
    shared = prompt // BLOCK_SIZE

    def walk(*requests: GenerateRequest) -> tuple[list[int], Bench]:
        bench = Bench(num_blocks=256, token_budget=256)
        for item in requests:
            bench.add(item)
        held = []
        while True:
            plan = bench.scheduler.plan()
            if plan is None:
                return held, bench
            drawn = bench.memory.run(plan)
            held.append(bench.pool.num_used)
            bench.take(bench.scheduler.commit(plan, drawn))

    together, forked = walk(request("r", range(prompt), num_choices, output))
    apart, alone = walk(*(request(str(i), range(prompt), 1, output, cache_salt=str(i)) for i in range(num_choices)))
    blocks = [num_blocks_for(prompt + step, BLOCK_SIZE) for step in range(output)]
    copying = num_choices > 1 and prompt % BLOCK_SIZE > 0 and output > 1
    assert together == [blocks[0], *(shared + num_choices * (count - shared) for count in blocks[1:])]
    assert apart == [num_choices * count for count in blocks]
    saved = [before - now for before, now in zip(apart[1:], together[1:], strict=True)]
    assert saved == [(num_choices - 1) * shared] * (output - 1)
    assert forked.memory.copied_blocks == (num_choices - 1 if copying else 0)
    assert alone.memory.computed_tokens - forked.memory.computed_tokens == (num_choices - 1) * prompt
    forked.assert_empty()


def test_a_choice_that_its_first_token_ends_leaves_the_others() -> None:
    prompt = tuple(range(6))
    plain = singles(request("r", prompt, max_tokens=8))
    for ended in plain:
        eos = (plain[ended][0],)
        bench = Bench(eos=eos)
        wanted = request("r", prompt)
        bench.add(wanted)
        [first] = bench.step()
        assert len(first.deltas) == 4 and not first.ended
        assert list(bench.finished) == [ended]
        bench.run()
        assert bench.outputs == singles(wanted, eos)
        assert bench.memory.copied_blocks == 2
        bench.assert_empty()


def test_the_last_choice_that_ends_ends_the_request_and_usage_is_told_once() -> None:
    bench = Bench()
    bench.add(request("r", range(6), max_tokens=3))
    progress: list[Progress] = []
    while step := bench.step():
        progress += step
    assert [item.ended for item in progress] == [False] * (len(progress) - 1) + [True]
    usages = [delta.usage for item in progress for delta in item.deltas if delta.usage is not None]
    assert [usage.computed_tokens for usage in usages] == [6]


def test_a_prefill_only_request_hands_over_one_table_and_a_first_token_for_each_choice() -> None:
    bench = Bench()
    wanted = request("r", range(10))
    bench.add(wanted, prefill_only=True)
    [done] = bench.step()
    assert done.ended and done.handed_over
    assert [delta.token_ids[0] for delta in done.deltas] == [tokens[0] for tokens in singles(wanted).values()]
    assert [delta.choice for delta in done.deltas] == [0, 1, 2, 3]
    assert bench.pool.num_used == len(done.block_table) == 3
    bench.pool.release(done.block_table)
    bench.assert_empty()


def test_choices_that_do_not_fit_together_are_preempted_one_by_one() -> None:
    """Each ends, and none takes the prompt's blocks away from the others."""
    prompt, max_tokens = tuple(range(9)), 12
    least = num_blocks_for(len(prompt) + max_tokens - 1, BLOCK_SIZE)
    bench = Bench(num_blocks=least + 1)
    wanted = request("r", prompt, max_tokens=max_tokens)
    bench.add(wanted)
    bench.run()
    assert bench.scheduler.num_preemptions > 0
    assert bench.outputs == singles(wanted)
    bench.assert_empty()
    with pytest.raises(BadRequest, match="max_tokens"):
        Bench(num_blocks=least - 1).add(wanted)


def test_a_prompt_preempted_before_it_forks_comes_back_whole() -> None:
    bench = Bench(num_blocks=8, token_budget=8)
    wanted = request("batch", range(12), priority=1, max_tokens=4)
    bench.add(wanted)
    bench.step()
    bench.add(request("due", range(100, 124), num_choices=1, max_tokens=4))
    bench.step()
    assert bench.scheduler.num_preemptions == 1
    bench.run()
    assert {name: bench.outputs[name] for name in singles(wanted)} == singles(wanted)


def test_a_newcomer_leaves_room_for_its_own_fork_and_for_those_who_are_about_to() -> None:
    bench = Bench(num_blocks=10)
    bench.add(request("runs", range(100, 105), max_tokens=12))  # 2 blocks; its fork takes 3, or 6 in time
    bench.add(request("waits", range(5), max_tokens=12))  # 2 and 3 beside the 4 that growth leaves: 11
    bench.step()
    assert bench.planned == ["runs"]
    other = Bench(num_blocks=11)
    other.add(request("runs", range(100, 105), max_tokens=12))
    other.add(request("waits", range(5), max_tokens=12))
    other.step()
    assert other.planned == ["runs", "waits"]
    bench.run()
    assert {name: bench.outputs[name] for name in singles(request("waits", range(5), max_tokens=12))} == singles(
        request("waits", range(5), max_tokens=12)
    )


def test_many_choices_in_a_small_pool_do_not_wait_for_room_that_can_never_be() -> None:
    bench = Bench(num_blocks=6)
    wanted = request("r", range(10), num_choices=MAX_CHOICES, max_tokens=6)
    bench.add(wanted)
    bench.run()
    assert bench.outputs == singles(wanted)


@pytest.mark.parametrize("num_choices", [0, -1, MAX_CHOICES + 1])
def test_a_number_of_choices_out_of_range_is_refused(num_choices: int) -> None:
    with pytest.raises(BadRequest, match="n: must be"):
        request("r", range(3), num_choices)
    request("r", range(3), MAX_CHOICES)


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
@pytest.mark.parametrize("in_flight", [True, False])
def test_a_cancel_ends_all_choices(steps: int, in_flight: bool) -> None:
    bench = Bench(token_budget=6)
    bench.add(request("r", range(7)))
    for _ in range(steps):
        bench.step()
    plan = bench.scheduler.plan() if in_flight else None
    assert bench.scheduler.cancel("r")
    if plan is not None:
        assert bench.take(bench.scheduler.commit(plan, bench.memory.run(plan))) == []
    bench.assert_empty()
    assert bench.scheduler.plan() is None


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_any_mix_with_forks_says_what_each_choice_says_alone(seed: int) -> None:
    walk(seed)


def test_the_walks_preempt_and_copy() -> None:
    """Else they prove little."""
    benches = [walk(seed) for seed in range(40)]
    assert sum(bench.scheduler.num_preemptions for bench in benches) > 20
    assert sum(bench.memory.copied_blocks for bench in benches) > 100


def never_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every choice writes into the block that all of them hold."""
    monkeypatch.setattr(BlockGrowth, "_must_copy", lambda self, sequence: False)


def free_copied_blocks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice gives the source of its copy back before the copy is made."""
    plan, commit = Scheduler.plan, Scheduler.commit

    def plan_and_free(self: Scheduler) -> StepPlan | None:
        step = plan(self)
        self.pool.release([source for source, _ in step.copies] if step else [])
        return step

    def hold_and_commit(self: Scheduler, step: StepPlan, drawn: list[tuple[Drawn, ...]]) -> list[Progress]:
        self.pool.hold([source for source, _ in step.copies])
        return commit(self, step, drawn)

    monkeypatch.setattr(Scheduler, "plan", plan_and_free)
    monkeypatch.setattr(Scheduler, "commit", hold_and_commit)


@pytest.mark.parametrize("plant", [never_copy, free_copied_blocks_at_once])
def test_the_walks_find_a_planted_bug(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch) -> None:
    plant(monkeypatch)
    with pytest.raises(SharedWrite):
        for seed in range(20):
            walk(seed)


class GoldenMemory(TokenMemory):
    """Draws the golden outputs."""

    outputs: dict[str, list[int]]

    def _draw(self, item) -> tuple[Drawn, ...]:
        return tuple(self.outputs[item.request_id][spec.position] for spec in item.samples)


def test_under_4_percent_of_the_slots_that_the_golden_load_holds_are_never_written() -> None:
    """Slots of held blocks without a token, over all steps that decode, as an exact count."""
    cases = json.loads(GOLDEN_FILE.read_text(encoding="utf-8"))["cases"]
    bench = Bench(num_blocks=512, token_budget=8192, block_size=16, context=8192)
    memory = bench.memory = GoldenMemory(bench.pool, 16)
    memory.outputs = {case["name"]: case["output_ids"] for case in cases}
    expected_held = expected_used = held = used = 0
    for case in cases:
        lengths = range(len(case["prompt_ids"]), len(case["prompt_ids"]) + len(case["output_ids"]))
        expected_held += sum(16 * num_blocks_for(length, 16) for length in lengths)
        expected_used += sum(lengths)
        stop = StopConditions(max_tokens=len(case["output_ids"]))
        bench.add(GenerateRequest(case["name"], tuple(case["prompt_ids"]), SamplingParams(0.0), stop))
    while (plan := bench.scheduler.plan()) is not None:
        drawn = memory.run(plan)
        held += 16 * bench.pool.num_used
        used += sum(item.end for item in plan.slices)
        bench.take(bench.scheduler.commit(plan, drawn))
    assert (held, used) == (expected_held, expected_used)
    assert (held - used) / held < 0.04  # 6218 of 247120
    assert bench.finished == {case["name"]: FinishReason.LENGTH for case in cases}
