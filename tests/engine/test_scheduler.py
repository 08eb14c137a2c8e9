"""The batch scheduler over a runner that checks every read: outputs never depend on who else runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.errors import BadRequest, InvariantBroken
from core.request import FinishReason, GenerateRequest, SamplingParams, StopConditions, TokenLogprobs
from engine.step import ScoredToken
from tests.engine.scheduler_bench import BLOCK_SIZE, Bench, request
from tests.engine.token_memory import undisturbed


@pytest.mark.parametrize("budget", [1, 3, 16, 64])
def test_chunks_do_not_change_the_output(budget: int) -> None:
    bench = Bench(token_budget=budget)
    bench.add(request("r", range(30)))
    bench.run()
    assert bench.outputs["r"] == undisturbed(tuple(range(30)), 8)
    assert bench.finished["r"] is FinishReason.LENGTH
    bench.assert_empty()


def test_decodes_go_before_prefills_and_share_the_budget() -> None:
    bench = Bench(token_budget=6)
    bench.add(request("old", range(4), max_tokens=20))
    bench.step()
    bench.add(request("new", range(100, 130)))
    plan = bench.scheduler.plan()
    assert plan is not None
    assert [(item.request_id, len(item.token_ids)) for item in plan.slices] == [("old", 1), ("new", 5)]


def test_a_prefix_hit_saves_work_but_never_the_last_token() -> None:
    bench = Bench()
    prompt = tuple(range(16))
    bench.add(request("first", prompt, max_tokens=1))
    bench.run()
    before = bench.memory.computed_tokens
    bench.add(request("again", prompt, max_tokens=1))
    bench.run()
    assert bench.memory.computed_tokens - before == BLOCK_SIZE  # 3 of 4 blocks hit, the last one is computed
    assert bench.outputs["again"] == bench.outputs["first"]


def test_salts_do_not_share_and_equal_salts_do() -> None:
    bench = Bench()
    prompt = tuple(range(16))
    counts = []
    for number, salt in enumerate(["x", "y", "x"]):
        before = bench.memory.computed_tokens
        bench.add(request(f"r{number}", prompt, max_tokens=1, salt=salt))
        bench.run()
        counts.append(bench.memory.computed_tokens - before)
    assert counts == [16, 16, 4]


def test_nothing_is_findable_before_it_is_computed() -> None:
    bench = Bench(token_budget=8)
    prompt = tuple(range(32))
    bench.add(request("a", prompt))
    plan = bench.scheduler.plan()
    assert plan is not None
    assert bench.pool.cached_hashes() == ()
    bench.take(bench.scheduler.commit(plan, bench.memory.run(plan)))
    assert len(bench.pool.cached_hashes()) == 2


def test_the_youngest_is_preempted_and_still_says_the_same() -> None:
    bench = Bench(num_blocks=10)
    prompts = {f"r{number}": tuple(range(number * 10, number * 10 + 8)) for number in range(3)}
    for name, prompt in prompts.items():
        bench.add(request(name, prompt, max_tokens=16))
    bench.run()
    assert bench.scheduler.num_preemptions > 0
    for name, prompt in prompts.items():
        assert bench.outputs[name] == undisturbed(prompt, 16)
    bench.assert_empty()


def test_a_request_that_can_never_fit_is_refused_by_field_and_one_that_just_fits_runs() -> None:
    bench = Bench(num_blocks=4)
    with pytest.raises(BadRequest, match="max_tokens"):
        bench.scheduler.new_sequence(request("r", range(10), max_tokens=7))
    bench.add(request("r", range(10), max_tokens=6))
    bench.run()
    assert bench.outputs["r"] == undisturbed(tuple(range(10)), 6)


def test_a_cancel_during_a_step_frees_when_the_step_commits() -> None:
    bench = Bench()
    bench.add(request("r", range(10)))
    plan = bench.scheduler.plan()
    assert plan is not None
    bench.scheduler.cancel("r")
    assert bench.pool.num_used > 0
    assert bench.take(bench.scheduler.commit(plan, bench.memory.run(plan))) == []
    bench.assert_empty()


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_a_cancel_between_steps_frees_at_once(steps: int) -> None:
    bench = Bench(token_budget=4)
    bench.add(request("r", range(10)))
    for _ in range(steps):
        bench.step()
    assert bench.scheduler.cancel("r")
    bench.assert_empty()
    assert not bench.scheduler.cancel("r")


def test_eos_stop_ids_and_ignore_eos() -> None:
    prompt = tuple(range(5))
    plain = undisturbed(prompt, 12)
    for how, eos, length in (
        ({}, (plain[3],), 4),
        ({"ignore_eos": True}, (plain[3],), 12),
        ({"stop_token_ids": (plain[5],)}, (), 6),
    ):
        bench = Bench(eos=eos)
        bench.add(request("r", prompt, max_tokens=12, **how))
        bench.run()
        assert bench.outputs["r"] == plain[:length]
        assert bench.finished["r"] is (FinishReason.STOP if length < 12 else FinishReason.LENGTH)


def test_until_min_tokens_eos_and_stop_ids_are_banned() -> None:
    bench = Bench(eos=(7,))
    bench.add(request("r", range(5), max_tokens=12, min_tokens=3, stop_token_ids=(9,)))
    banned = []
    for _ in range(5):
        plan = bench.scheduler.plan()
        assert plan is not None
        [sample] = plan.samples
        banned.append(set(sample.banned_token_ids))
        bench.take(bench.scheduler.commit(plan, bench.memory.run(plan)))
    assert banned == [{7, 9}, {7, 9}, {7, 9}, set(), set()]


def test_a_prefill_only_sequence_hands_its_blocks_over() -> None:
    bench = Bench(token_budget=8)
    bench.add(request("r", range(10)), prefill_only=True)
    first, second = bench.step(), bench.step()
    assert [item.handed_over for item in first + second] == [False, True]
    assert bench.outputs["r"] == undisturbed(tuple(range(10)), 1)
    assert bench.pool.num_used == 3
    bench.pool.release(second[0].block_table)
    bench.assert_empty()


def test_a_landed_sequence_decodes_without_computing_its_prompt() -> None:
    bench = Bench()
    prompt = tuple(range(10))
    blocks = bench.pool.allocate(3)
    assert blocks is not None
    for position, token in enumerate(prompt):
        bench.memory.slots[blocks[position // BLOCK_SIZE], position % BLOCK_SIZE] = token
    expected = undisturbed(prompt, 8)
    sequence = bench.scheduler.new_sequence(request("r", prompt))
    assert bench.scheduler.add_landed(sequence, blocks, expected[:1])
    bench.outputs["r"].append(expected[0])
    bench.run()
    assert bench.outputs["r"] == expected
    assert bench.memory.computed_tokens == 7  # one for each token but the first
    bench.assert_empty()


@pytest.mark.parametrize("num_intact", [0, 1, 2])
@pytest.mark.parametrize("length", [10, 12])
def test_a_sequence_that_landed_in_part_computes_the_rest_again(num_intact: int, length: int) -> None:
    """What came after the first bad block is never read; what came before it is a hit."""
    bench = Bench()
    prompt = tuple(range(length))
    blocks = bench.pool.allocate(3)
    assert blocks is not None
    for position, token in enumerate(prompt):
        whole = position // BLOCK_SIZE < num_intact
        bench.memory.slots[blocks[position // BLOCK_SIZE], position % BLOCK_SIZE] = token if whole else token + 500
    expected = undisturbed(prompt, 8)
    sequence = bench.scheduler.new_sequence(request("r", prompt))
    assert bench.scheduler.add_landed(sequence, blocks, expected[:1], num_intact)
    bench.outputs["r"].append(expected[0])
    bench.run()
    assert bench.outputs["r"] == expected
    assert bench.memory.computed_tokens == 7 + length - num_intact * BLOCK_SIZE
    bench.assert_empty()


def test_a_landed_sequence_that_its_first_token_ends_is_released() -> None:
    bench = Bench()
    blocks = bench.pool.allocate(3)
    sequence = bench.scheduler.new_sequence(request("r", range(10), max_tokens=1))
    assert blocks is not None
    assert not bench.scheduler.add_landed(sequence, blocks, [5])
    bench.assert_empty()


def test_two_steps_are_never_in_flight() -> None:
    bench = Bench()
    bench.add(request("r", range(10)))
    plan = bench.scheduler.plan()
    assert plan is not None
    with pytest.raises(InvariantBroken):
        bench.scheduler.plan()


def test_penalties_see_prompt_and_output_and_cost_nothing_when_off() -> None:
    sampling = SamplingParams(0.0, repetition_penalty=1.2)
    bench = Bench()
    bench.add(GenerateRequest("on", (1, 2, 3), sampling, StopConditions(max_tokens=4)))
    bench.add(GenerateRequest("presence", (1, 2, 3), SamplingParams(presence_penalty=1), StopConditions(max_tokens=4)))
    bench.add(request("off", (1, 2, 3), max_tokens=4))
    for position in range(4):
        plan = bench.scheduler.plan()
        assert plan is not None
        specs = {item.request_id: item.samples[0] for item in plan.slices}
        seen = {name: (spec.prompt_token_ids, spec.output_token_ids) for name, spec in specs.items()}
        assert seen["on"] == ((1, 2, 3), tuple(bench.outputs["on"]))
        assert seen["presence"] == ((), tuple(bench.outputs["presence"]))
        assert seen["off"] == ((), ())
        assert len(bench.outputs["on"]) == position
        bench.take(bench.scheduler.commit(plan, bench.memory.run(plan)))
    bench.assert_empty()


def test_logprobs_reach_the_delta() -> None:
    bench = Bench()
    bench.add(request("scored", (1, 2, 3), max_tokens=4))
    bench.add(request("bare", (1, 2, 3), max_tokens=4))
    plan = bench.scheduler.plan()
    assert plan is not None
    logprobs = TokenLogprobs(-0.5, ((7, -0.5), (8, -1.5)))
    scored, bare = bench.scheduler.commit(plan, [(ScoredToken(7, logprobs),), (8,)])
    assert [(delta.token_ids, delta.logprobs) for delta in scored.deltas] == [((7,), (logprobs,))]
    assert [(delta.token_ids, delta.logprobs) for delta in bare.deltas] == [((8,), ())]


class EndsAfter:
    """A stop watch over token ids: the stop string is complete when its last tokens are these."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = list(tokens)
        self.seen: list[int] = []

    def push(self, token_id: int) -> str | None:
        self.seen.append(token_id)
        return "stop" if self.seen[-len(self.tokens) :] == self.tokens else None


@pytest.mark.parametrize("num_out", range(1, 10))
def test_a_request_goes_on_after_the_output_that_is_out(num_out: int) -> None:
    """Wherever it is cut: positions, max_tokens, and a stop string of which the first half is out already."""
    prompt = tuple(range(20))
    whole = undisturbed(prompt, 10)

    def run(max_tokens: int, watched: tuple[int, ...]) -> tuple[list[int], FinishReason]:
        bench = Bench(make_watch=lambda _request: EndsAfter(*watched))
        item = replace(
            request("r", prompt, max_tokens=max_tokens, stop_strings=("stop",)), output_token_ids=tuple(whole[:num_out])
        )
        bench.outputs["r"] = list(item.output_token_ids)  # its positions go on
        bench.add(item)
        bench.run()
        bench.assert_empty()
        return bench.outputs["r"], bench.finished["r"]

    assert run(10, (-1,)) == (whole, FinishReason.LENGTH)
    assert run(100, tuple(whole[num_out - 1 : num_out + 1])) == (whole[: num_out + 1], FinishReason.STOP)


def test_output_that_leaves_nothing_to_generate_is_refused() -> None:
    with pytest.raises(BadRequest, match="output_token_ids"):
        replace(request("r", range(4), max_tokens=2), output_token_ids=(1, 2))
    with pytest.raises(BadRequest, match="output_token_ids"):
        replace(request("r", range(4), max_tokens=9), output_token_ids=(1, 2), num_choices=2)
