"""The cases of the field's own schedulers that broke them, numbered as in notes/invariants.md of the founding team.

Covered elsewhere:
15  A hand-off lands whole or not at all, so no computed run is ever cut short; what fails is planned again:
    tests/router/test_dispatcher.py::test_a_failed_transfer_is_planned_again_until_attempts_run_out, and a prefix that
    does not come is computed: tests/simulation/test_cluster_world.py.
20  A timeout releases once: tests/kv_transfer/test_target.py, tests/simulation/test_handoff_world.py; a second release
    raises: test_block_pool.py::test_what_must_not_happen_is_a_bug.
34  Hash of parent, tokens and namespace: tests/core/test_identity.py.
35  test_scheduler.py::test_salts_do_not_share_and_equal_salts_do, which has the positive hit.
36  test_scheduler.py::test_a_prefix_hit_saves_work_but_never_the_last_token.
37  test_block_pool.py::test_the_tail_of_a_table_is_evicted_before_its_head, ::test_a_held_block_is_not_evicted.
38  test_block_pool.py::test_a_hit_that_needs_more_than_there_is_changes_nothing.
39  Nothing here resets a cache while it is used: an identity that changes is another worker.
40  Whole models: tests/engine/test_invariance.py, tests/acceptance/test_parity.py.
"""

from __future__ import annotations

import itertools
import random

import pytest

from core.request import GenerateRequest, SamplingParams, StopConditions, TokenLogprobs
from engine.block_pool import BlockPool
from engine.scheduler import Reservation
from engine.sequence import Sequence
from engine.step import Drawn, ScoredToken, SequenceSlice
from tests.engine.scheduler_bench import BLOCK_SIZE, Bench, request
from tests.engine.token_memory import TokenMemory, next_token, undisturbed


def await_room(bench: Bench, name: str, prompt, **more) -> Sequence:
    """A request whose prompt KV will come from a peer."""
    sequence = bench.scheduler.new_sequence(request(name, prompt, **more))
    bench.scheduler.await_room(sequence)
    return sequence


def land(bench: Bench, reservation: Reservation) -> None:
    """A peer writes the prompt's KV and draws the first token."""
    sequence, table = reservation.sequence, [*reservation.hits, *reservation.fresh]
    prompt = sequence.request.prompt_token_ids
    for position in range(len(reservation.hits) * BLOCK_SIZE, len(prompt)):
        bench.memory.slots[table[position // BLOCK_SIZE], position % BLOCK_SIZE] = prompt[position]
    first = undisturbed(prompt, 1)[0]
    bench.outputs[sequence.request_id].append(first)
    bench.scheduler.add_landed(sequence, table, [first])


def fail(bench: Bench, reservation: Reservation) -> None:
    bench.scheduler.end_reservation(reservation.sequence)
    bench.pool.release(reservation.hits)
    bench.pool.quarantine(reservation.fresh)
    bench.pool.end_quarantine(reservation.fresh)


def test_a_landed_request_runs_although_the_head_of_the_line_cannot() -> None:
    """14"""
    bench = Bench(num_blocks=12, scan_depth=0)
    await_room(bench, "landed", range(100, 110), max_tokens=6)
    reservation = bench.scheduler.reserve_next()
    assert reservation is not None
    bench.add(request("head", range(40), max_tokens=2))  # 10 blocks, of which the landed one has 3
    assert bench.step() == []
    land(bench, reservation)
    bench.run()
    assert bench.outputs["landed"] == undisturbed(tuple(range(100, 110)), 6)
    assert bench.outputs["head"] == undisturbed(tuple(range(40)), 2)
    bench.assert_empty()


def test_a_stream_of_local_prompts_does_not_starve_one_that_awaits_room_for_a_hand_off() -> None:
    """14: two lines share the pool, and who comes later in either leaves the room that the earlier one waits for."""
    bench = Bench(num_blocks=12)
    bench.add(request("runs", range(8), max_tokens=8))
    bench.step()
    await_room(bench, "remote", range(100, 140), max_tokens=4)  # 10 blocks
    reservation = None
    for step in range(40):
        reservation = bench.scheduler.reserve_next()
        if reservation is not None:
            break
        bench.add(request(f"local{step}", (step, step + 1), max_tokens=6))
        bench.step()
    assert reservation is not None
    assert not any(name.startswith("local") for name in bench.finished)
    land(bench, reservation)
    bench.run()
    assert bench.outputs["remote"] == undisturbed(tuple(range(100, 140)), 4)
    bench.assert_empty()


def test_a_stream_of_hand_offs_does_not_starve_a_local_prompt_or_a_preempted_request() -> None:
    """14"""
    bench = Bench(num_blocks=12)
    bench.add(request("runs", range(8), max_tokens=8))
    bench.step()
    bench.add(request("local", range(100, 144), max_tokens=4))
    held: list[Reservation] = []
    for step in range(40):
        await_room(bench, f"remote{step}", (step,), max_tokens=2)
        if (reservation := bench.scheduler.reserve_next()) is not None:
            held.append(reservation)
        bench.step()
        if "local" in bench.planned:
            break
    assert "local" in bench.planned
    assert len(held) <= 1  # one block is left beside the eleven that the local one needs


def test_a_request_that_is_aborted_leaves_every_line_and_no_other_one_does() -> None:
    """21: by identity; two attempts may have equal prompts, and the same request may come again."""
    bench = Bench(num_blocks=8)
    first, second, third = (await_room(bench, name, range(20), max_tokens=2) for name in ("a", "b", "c"))
    reservation = bench.scheduler.reserve_next()
    assert reservation is not None and reservation.sequence is first
    bench.scheduler.end_reservation(second)  # awaits room
    fail(bench, reservation)  # is reserved
    bench.scheduler.end_reservation(first)  # twice: nothing is left to remove
    after = bench.scheduler.reserve_next()
    assert after is not None and after.sequence is third
    fail(bench, after)
    assert bench.scheduler.reserve_next() is None
    for name in ("x", "y"):
        bench.add(request(name, range(20), max_tokens=2))
    bench.scheduler.cancel("x")
    bench.run()
    assert set(bench.finished) == {"y"}
    bench.assert_empty()


@pytest.mark.parametrize("hit", [True, False])
@pytest.mark.parametrize("way", ["land", "fail", "cancel", "compute"])
def test_references_balance_whatever_the_way_out(hit: bool, way: str) -> None:
    """22: five repeats leak nothing, and cached blocks are held by nobody at the end."""
    bench = Bench()
    prompt = tuple(range(18))
    if hit:
        bench.add(request("warm", prompt, max_tokens=1))
        bench.run()
    for number in range(5):
        salt = "" if hit else f"salt{number}"
        name = f"r{number}"
        if way == "compute":
            bench.add(request(name, prompt, salt=salt))
        else:
            await_room(bench, name, prompt, salt=salt)
            reservation = bench.scheduler.reserve_next()
            assert reservation is not None and len(reservation.hits) == (4 if hit else 0)
            if way == "fail":
                fail(bench, reservation)
            else:
                land(bench, reservation)
            if way == "cancel":
                bench.step()
                bench.scheduler.cancel(name)
        bench.run()
        bench.assert_empty()
        assert bench.pool.num_free == bench.pool.num_blocks


def test_room_is_counted_after_the_hits_are_held() -> None:
    """23: a hit that nobody held was free room until it is taken."""
    bench = Bench(num_blocks=8, growth_blocks=0)
    bench.add(request("warm", range(16), max_tokens=1))
    bench.run()  # 4 cached blocks among 8 free ones
    bench.add(request("runs", range(100, 108), max_tokens=4))
    bench.step()
    # 4 hits and 3 fresh ones: 7 of the 6 that are free. Counting hits as a gift would take blocks that do not exist.
    bench.add(request("hit", range(28), max_tokens=1))
    bench.step()
    assert "hit" not in bench.planned
    assert bench.pool.num_used == 3
    bench.run()
    assert bench.outputs["hit"] == undisturbed(tuple(range(28)), 1)
    bench.assert_empty()


def test_preempted_requests_come_back_in_order_as_pages_allow() -> None:
    """24: the rest stay in line; who comes later goes behind them."""
    bench = Bench(num_blocks=9, growth_blocks=0, scan_depth=0)
    for number in range(3):
        bench.add(request(f"r{number}", range(number * 20, number * 20 + 8), max_tokens=20))
    while bench.scheduler.num_preemptions < 2:
        bench.step()
    assert bench.planned == ["r0"]
    bench.add(request("later", range(100, 104), max_tokens=2))
    back = []
    while bench.step():
        back += [name for name in bench.planned if name not in back]
    assert back == ["r0", "r1", "r2", "later"]
    for number in range(3):
        assert bench.outputs[f"r{number}"] == undisturbed(tuple(range(number * 20, number * 20 + 8)), 20)
    bench.assert_empty()


def test_a_step_in_flight_keeps_the_blocks_of_all_its_sequences() -> None:
    """32: neither a cancel nor a due reservation that wants the room of batch work takes any before the commit."""
    bench = Bench(num_blocks=8, token_budget=32)
    bench.add(request("batch", range(12), max_tokens=8, priority=1))
    bench.add(request("gone", range(100, 108), max_tokens=8))
    bench.step()
    await_room(bench, "due", range(200, 220), max_tokens=2)  # 5 blocks
    plan = bench.scheduler.plan()
    assert plan is not None
    in_step = {block for item in plan.slices for block in item.block_table}
    bench.scheduler.cancel("gone")
    assert bench.scheduler.reserve_next() is None
    assert all(bench.pool._references[block] > 0 for block in in_step)
    bench.take(bench.scheduler.commit(plan, bench.memory.run(plan)))
    reservation = bench.scheduler.reserve_next()
    assert reservation is not None and reservation.sequence.request_id == "due"
    land(bench, reservation)
    bench.run()
    assert bench.outputs["batch"] == undisturbed(tuple(range(12)), 8)
    assert bench.outputs["due"] == undisturbed(tuple(range(200, 220)), 2)
    bench.assert_empty()


def test_a_request_that_ends_by_its_length_frees_at_the_commit() -> None:
    """32"""
    bench = Bench()
    bench.add(request("r", range(10), max_tokens=1))
    bench.step()
    bench.assert_empty()


def test_after_many_mixed_requests_nothing_is_left() -> None:
    """33"""
    rng = random.Random(0)
    bench = Bench(num_blocks=24)
    for number in range(200):
        priority = rng.choice([-1, 0, 1])
        prompt = tuple(range(rng.choice([0, 500]), 1000))[: rng.randrange(1, 30)]
        match rng.randrange(3):
            case 0:
                bench.add(request(f"r{number}", prompt, priority=priority))
            case 1:
                await_room(bench, f"r{number}", prompt, priority=priority)
            case 2:
                bench.scheduler.cancel(f"r{rng.randrange(number + 1)}")
        if (reservation := bench.scheduler.reserve_next()) is not None:
            rng.choice([land, fail])(bench, reservation)
        bench.step()
    bench.run()
    while (reservation := bench.scheduler.reserve_next()) is not None:
        fail(bench, reservation)
    bench.assert_empty()
    assert bench.pool.num_free == bench.pool.num_blocks
    scheduler = bench.scheduler
    assert not any((scheduler._sequences, scheduler._running, scheduler._reserved))
    assert (len(scheduler._waiting), len(scheduler._awaiting_room)) == (0, 0)


def test_what_a_preempted_request_computed_is_found_again_unless_it_was_needed() -> None:
    """37: its blocks are free and the most recent of all, so that others are evicted first."""
    bench = Bench(num_blocks=16, token_budget=64)
    bench.add(request("old", range(500, 516), max_tokens=1))
    bench.run()
    bench.add(request("batch", range(16), max_tokens=4, priority=1))
    bench.step()
    before = bench.memory.computed_tokens
    bench.add(request("due", range(100, 145), max_tokens=1))  # 12 blocks: "batch" has 4, and "old" left 4
    bench.step()
    assert bench.planned == ["due"] and bench.scheduler.num_preemptions == 1
    bench.run()
    assert bench.memory.computed_tokens - before == 45 + 3  # 16 more, were its blocks gone


class ScoringMemory(TokenMemory):
    """Draws with a log probability that depends on all tokens before."""

    def _draw(self, item: SequenceSlice) -> tuple[Drawn, ...]:
        context = self.context(item)
        scored = ScoredToken(next_token(context), TokenLogprobs(-next_token([*context, 1]) / 1000))
        return tuple(scored for _spec in item.samples)


@pytest.mark.parametrize("way", ["chunked", "prefix hit", "preempted"])
def test_tokens_and_log_probabilities_do_not_depend_on_the_way(way: str) -> None:
    """40"""

    def run(prepare: bool, **settings) -> tuple[list[int], list[TokenLogprobs], Bench]:
        bench = Bench(**settings)
        bench.memory = ScoringMemory(bench.pool, BLOCK_SIZE)
        sampling = SamplingParams(0.0, top_logprobs=0)
        if prepare and way == "prefix hit":
            bench.add(GenerateRequest("warm", tuple(range(20)), sampling, StopConditions(max_tokens=3)))
            bench.run()
        if prepare and way == "preempted":
            bench.add(GenerateRequest("other", tuple(range(90, 110)), sampling, StopConditions(max_tokens=12)))
        bench.add(GenerateRequest("r", tuple(range(20)), sampling, StopConditions(max_tokens=12)))
        logprobs = []
        while progress := bench.step():
            logprobs += itertools.chain.from_iterable(
                delta.logprobs for item in progress if item.request_id == "r" for delta in item.deltas
            )
        return bench.outputs["r"], logprobs, bench

    plain_tokens, plain_logprobs, _ = run(prepare=False, token_budget=64)
    settings = {"chunked": {"token_budget": 3}, "preempted": {"num_blocks": 13, "growth_blocks": 0}}.get(way, {})
    tokens, logprobs, bench = run(prepare=True, **settings)
    assert (tokens, logprobs) == (plain_tokens, plain_logprobs)
    assert len(logprobs) == 12
    assert (bench.scheduler.num_preemptions > 0) is (way == "preempted")


def test_a_block_pool_keeps_what_it_is_told_to_keep_free() -> None:
    """23, 24: room is physical pages, hits that are taken included."""
    pool = BlockPool(4)
    assert pool.acquire([], 3, keep_free=2) is None
    assert pool.num_free == 4
    assert pool.acquire([], 3, keep_free=1) is not None
