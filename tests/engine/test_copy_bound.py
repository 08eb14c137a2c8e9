"""What one step's decodes wait for while blocks are copied between the pool and the host, counted in copies.

Random schedules under a bound: tests/engine/scheduler_walk.py.
"""

from __future__ import annotations

import pytest

from core.blocks import CacheTier
from engine.cache_tiers import CacheTiers
from engine.copy_wait import COPY_PATIENCE, CopyWait
from engine.host_slots import STEP_COPY_BYTES, HostSlots
from tests.engine.scheduler_bench import BLOCK_SIZE, Bench, request
from tests.engine.token_memory import undisturbed
from tests.engine.token_tiers import TokenTiers

NUM_BLOCKS = 40
PER_STEP = 3
LONG = tuple(range(100, 100 + 24 * BLOCK_SIZE))  # 24 blocks, of which a hit may cover 23


class Busy(Bench):
    """A pool full of cached blocks above a host that has room for all, and how many copies each step had."""

    def __init__(self, num_host_slots: int = 200, per_step: int = PER_STEP) -> None:
        tiers = TokenTiers(num_host_slots)
        tiers.copies_per_step = per_step
        super().__init__(NUM_BLOCKS, tiers=tiers, growth_blocks=0)
        self.copies: list[int] = []
        self.cached: dict[str, int] = {}
        for number in range(5):
            self.old(number)
        self.run()
        self.copies.clear()

    def old(self, number: int) -> None:
        """8 blocks, all different ones."""
        self.add(request(f"old {number}", range(1000 + 100 * number, 1000 + 100 * number + 31), max_tokens=1))

    def step(self):
        before = self.tiers.num_copies
        progress = super().step()
        self.copies.append(self.tiers.num_copies - before)
        return progress

    def take(self, progress):
        for item in progress:
            for delta in item.deltas:
                if delta.usage is not None:
                    self.cached[delta.request_id] = delta.usage.cached_tokens // BLOCK_SIZE
        return super().take(progress)

    def stream(self, name: str = "stream", max_tokens: int = 100) -> None:
        """One that decodes from now on."""
        self.add(request(name, [len(self.outputs)], max_tokens=max_tokens))
        while not self.outputs[name]:
            self.step()

    def until(self, name: str) -> int:
        """The steps until the first token of `name`."""
        num_steps = 0
        while not self.outputs[name]:
            assert self.step(), "nothing is computed"
            num_steps += 1
        return num_steps


def num_computing_steps(num_tokens: int) -> int:
    return -(-num_tokens // 15)  # beside one decode, of a budget of 16


def test_a_long_prompt_that_evicts_many_blocks_delays_no_decode_by_more_than_a_steps_copies() -> None:
    bench = Busy()
    bench.stream()
    bench.copies.clear()
    bench.add(request("long", LONG, max_tokens=2))
    before = len(bench.outputs["stream"])
    num_steps = bench.until("long")
    assert max(bench.copies) <= PER_STEP
    assert len(bench.outputs["stream"]) - before == num_steps  # a token each
    assert num_steps <= num_computing_steps(len(LONG)) + -(-24 // PER_STEP)
    assert bench.outputs["long"] == undisturbed(LONG, 1)
    assert bench.pool.num_cached_by_tier()[CacheTier.HOST] >= 19  # nothing of it is lost


def test_without_a_bound_all_is_copied_in_one_step() -> None:
    """The control; and where nothing runs, nobody waits for it."""
    for bench in (Busy(per_step=1000), Busy()):
        if bench.tiers.copies_per_step > PER_STEP:
            bench.stream()
        bench.copies.clear()
        bench.add(request("long", LONG, max_tokens=2))
        bench.until("long")
        assert max(bench.copies) >= 19


def test_a_long_hit_in_the_host_is_found_whole_though_its_copies_take_many_steps() -> None:
    bench = Busy()
    bench.add(request("cold", LONG, max_tokens=1))
    for number in range(5, 13):
        bench.old(number)
    bench.run()
    assert bench.pool.match(bench.scheduler.new_sequence(request("r", LONG)).reusable_hashes()) == []
    bench.stream()
    bench.copies.clear()
    hits = dict(bench.pool.hit_blocks)
    bench.add(request("again", LONG, max_tokens=2))
    num_steps = bench.until("again")
    assert bench.cached["again"] == 23
    assert bench.pool.hit_blocks == {**hits, CacheTier.HOST: hits[CacheTier.HOST] + 23}  # though brought ahead
    assert max(bench.copies) <= PER_STEP
    assert sum(bench.copies) <= 2 * 24 + num_steps and num_steps <= COPY_PATIENCE * 2 * 24 / PER_STEP
    bench.run()
    assert bench.outputs["again"] == undisturbed(LONG, 2)


def test_decodes_that_take_all_copies_keep_nobody_waiting_for_ever() -> None:
    """Each step some stream needs a block, and all that are free hold something."""
    bench = Busy(per_step=1)
    for number in range(4):
        bench.stream(f"stream {number}", max_tokens=60)
        bench.step()  # so that each needs its next block in another step
    bench.copies.clear()
    prompt = LONG[:40]
    bench.add(request("long", prompt, max_tokens=2))
    num_steps = bench.until("long")
    assert max(bench.copies) <= 1
    assert num_steps <= num_computing_steps(len(prompt)) + COPY_PATIENCE * 11
    assert bench.outputs["long"] == undisturbed(prompt, 1)


def test_a_reservation_for_a_peer_waits_for_its_copies_as_well() -> None:
    bench = Busy()
    bench.stream()
    before = bench.tiers.num_copies
    bench.scheduler.await_room(bench.scheduler.new_sequence(request("handed", LONG)))
    num_steps = 0
    while (taken := bench.scheduler.reserve_next()) is None:
        bench.step()
        num_steps += 1
        assert num_steps <= 10
    assert num_steps > 3 and len(taken.hits) + len(taken.fresh) == 24
    assert bench.tiers.num_copies - before <= PER_STEP * (num_steps + 1)


def test_what_one_step_may_copy_is_bounded_in_bytes() -> None:
    import torch

    small, large = (HostSlots([torch.zeros(2, block_bytes // 4)], 1) for block_bytes in (4096, 1 << 26))
    assert small.copies_per_step * 4096 == STEP_COPY_BYTES
    assert large.copies_per_step == 1  # at least one, or nothing ever moves


@pytest.mark.parametrize(
    ("owner", "name", "planted"),
    [(CacheTiers, "allow_copies", lambda *_, **__: None), (CopyWait, "waits", lambda *_: False)],
    ids=["no bound", "nobody waits"],
)
def test_these_are_seen(owner: type, name: str, planted: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: then a step copies all, or hits are lost."""
    monkeypatch.setattr(owner, name, planted)
    with pytest.raises(AssertionError):
        test_a_long_hit_in_the_host_is_found_whole_though_its_copies_take_many_steps()
