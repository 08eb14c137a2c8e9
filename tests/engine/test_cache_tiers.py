"""Blocks that the pool gives up come back from host memory and from the disk as they were, and only for their key.

Longer: python -m tests.engine.scheduler_walk --walks 100000
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from core.blocks import CacheTier
from core.errors import InvariantBroken
from core.identity import BlockHash
from core.request import TokenDelta
from engine.block_pool import BlockPool
from engine.cache_changes import CacheChanges
from engine.cache_tiers import CacheTiers, DiskRead, DiskWrite
from engine.slot_table import SlotTable
from engine.step import NOT_FINITE, StepPlan
from tests.engine.scheduler_bench import BLOCK_SIZE, Bench, request
from tests.engine.scheduler_walk import walk, walk_all
from tests.engine.token_memory import StaleRead, undisturbed
from tests.engine.token_tiers import TokenTiers

PROMPT = tuple(range(24))  # 6 blocks, of which a hit may cover 5
NUM_REUSABLE = 5
NUM_BLOCKS = 8


class Run(Bench):
    """A pool that holds one request, and tiers below it."""

    def __init__(self, num_host_slots: int = 16, num_disk_slots: int = 0) -> None:
        super().__init__(NUM_BLOCKS, tiers=TokenTiers(num_host_slots, num_disk_slots))
        self.cached: dict[str, int] = {}

    def take(self, progress):
        deltas: list[TokenDelta] = [delta for item in progress for delta in item.deltas]
        self.cached |= {delta.request_id: delta.usage.cached_tokens for delta in deltas if delta.usage is not None}
        return super().take(progress)

    def say(self, name: str, prompt=PROMPT, salt: str = "") -> int:
        """Run one request alone, check what it says; returns how many blocks of it were cached."""
        self.add(request(name, prompt, max_tokens=5, salt=salt))
        self.run()
        assert self.outputs[name] == undisturbed(prompt, 5)
        self.assert_empty()
        assert self.pool.num_free == NUM_BLOCKS
        self.tiers.check()
        return self.cached[name] // BLOCK_SIZE

    def push_out(self, name: str = "other") -> None:
        """Another request takes all blocks of the pool."""
        self.say(name, tuple(range(500, 500 + 27)), salt=name)


def test_what_the_pool_gives_up_is_found_in_host_memory() -> None:
    bench = Run()
    assert bench.say("cold") == 0
    bench.push_out()
    assert bench.pool.match(bench.scheduler.new_sequence(request("r", PROMPT)).reusable_hashes()) == []
    assert bench.say("again") == NUM_REUSABLE
    assert bench.pool.hit_blocks[CacheTier.HOST] == NUM_REUSABLE
    without = Run(num_host_slots=0)
    without.say("cold")
    without.push_out()
    assert without.say("again") == 0


def test_a_hit_may_lie_in_both_and_end_before_the_prompt_does() -> None:
    bench = Run(num_host_slots=3)
    bench.say("cold")
    bench.add(request("half", range(700, 720), max_tokens=1, salt="x"))  # takes 5 of 8 blocks: the tail of PROMPT's
    bench.run()
    hashes = bench.scheduler.new_sequence(request("r", PROMPT)).reusable_hashes()
    assert len(bench.pool.match(hashes)) == 3
    before = dict(bench.pool.hit_blocks)
    longer = (*PROMPT[:20], *range(900, 907))
    assert bench.say("partial", longer) == NUM_REUSABLE
    assert bench.pool.hit_blocks[CacheTier.DEVICE] - before[CacheTier.DEVICE] == 3
    assert bench.pool.hit_blocks[CacheTier.HOST] - before[CacheTier.HOST] == 2


def test_a_prompt_of_whole_blocks_is_never_covered_whole() -> None:
    bench = Run()
    bench.say("cold")
    bench.push_out()
    computed = bench.memory.computed_tokens
    bench.say("again")
    assert bench.memory.computed_tokens - computed == BLOCK_SIZE + 4  # its last block, and 4 decodes


def test_another_salt_has_no_hit() -> None:
    bench = Run(num_host_slots=64)
    bench.say("cold", salt="a")
    bench.push_out()
    assert bench.say("other salt", salt="b") == 0
    bench.push_out("other 2")
    assert bench.say("same salt", salt="a") == NUM_REUSABLE


def on_disk() -> Run:
    """PROMPT's blocks are on the disk, and no longer in host memory."""
    bench = Run(num_host_slots=16, num_disk_slots=64)
    bench.say("cold")
    for number in range(4):
        bench.push_out(f"other {number}")
        bench.tiers.settle()
    hashes = bench.scheduler.new_sequence(request("r", PROMPT)).reusable_hashes()
    assert {bench.pool.place(block_hash) for block_hash in hashes} == {CacheTier.DISK}
    return bench


def test_what_the_host_gives_up_is_read_from_the_disk_once_for_all_who_wait() -> None:
    bench = on_disk()
    bench.add(request("one", PROMPT, max_tokens=1))
    bench.add(request("two", PROMPT, max_tokens=1))
    assert bench.scheduler.plan() is None  # both wait for the disk
    bench.run()
    assert bench.outputs["one"] == bench.outputs["two"] == undisturbed(PROMPT, 1)
    assert bench.cached == {**bench.cached, "one": NUM_REUSABLE * BLOCK_SIZE, "two": NUM_REUSABLE * BLOCK_SIZE}
    assert bench.tiers.num_reads == NUM_REUSABLE
    assert bench.pool.hit_blocks[CacheTier.DISK] == NUM_REUSABLE


def test_a_block_that_comes_back_damaged_is_computed_with_all_that_follow() -> None:
    bench = on_disk()
    block_hash = bench.scheduler.new_sequence(request("r", PROMPT)).reusable_hashes()[2]
    bench.tiers.disk[bench.tiers.decisions._disk.slot(block_hash)][1] ^= 1
    assert bench.say("again") == 2
    assert bench.tiers.decisions.num_damaged == 1


def test_a_request_that_is_cancelled_while_the_disk_is_read_leaves_nothing_behind() -> None:
    bench = on_disk()
    bench.add(request("gone", PROMPT))
    assert bench.scheduler.plan() is None
    bench.tiers.io()
    assert bench.scheduler.cancel("gone")
    bench.run()
    bench.assert_empty()
    bench.tiers.check()


@pytest.mark.parametrize("when", ["settled", "written", "read"])
def test_what_comes_to_a_nan_is_in_no_tier_any_more(when: str) -> None:
    """Not even when the disk is writing or reading one of its blocks."""
    bench = Run(num_host_slots=16, num_disk_slots=64) if when == "written" else on_disk()
    hashes = bench.scheduler.new_sequence(request("r", PROMPT)).reusable_hashes()
    if when == "written":
        bench.say("cold")
        bench.pool.release(bench.pool.allocate(NUM_BLOCKS) or [])
        while bench.tiers.under_way is None or bench.tiers.under_way[0].block_hash not in hashes:
            assert bench.tiers.io()
        assert isinstance(bench.tiers.under_way[0], DiskWrite)
    assert all(map(bench.pool.place, hashes))
    if when == "read":
        bench.pool.fetch(hashes)
        bench.tiers.io()
        assert bench.tiers.under_way
        blocks = bench.pool.allocate(len(hashes)) or []
        for block, block_hash in zip(blocks, hashes, strict=True):  # computed meanwhile, for somebody who did not wait
            bench.pool.cache(block, block_hash)
        bench.pool.forget(blocks)
        bench.pool.release(blocks)
    else:
        bench.add(request("nan", PROMPT))
        while not isinstance(plan := bench.scheduler.plan(), StepPlan):
            bench.tiers.io()
        bench.take(bench.scheduler.commit(plan, [(NOT_FINITE,)] * len(plan.slices)))
    assert not any(map(bench.pool.place, hashes))
    bench.tiers.settle()
    assert not any(map(bench.pool.place, hashes))
    bench.tiers.check()
    bench.pool.check()
    assert bench.say("again") == 0


def test_a_disk_that_fails_keeps_nobody_waiting() -> None:
    bench = on_disk()
    bench.add(request("waits", PROMPT, max_tokens=5))
    assert bench.scheduler.plan() is None
    bench.tiers.decisions.lose_disk()
    bench.run()
    assert bench.outputs["waits"] == undisturbed(PROMPT, 5)
    assert bench.cached["waits"] == 0
    assert bench.tiers.decisions.num_blocks(CacheTier.DISK) == 0


def name(text: str) -> BlockHash:
    return BlockHash(text.encode())


def test_reads_take_half_of_the_host_at_most() -> None:
    tiers = TokenTiers(4, 16)
    tiers.memory = Bench().memory
    names = [name(text) for text in "abcdefghij"]
    for block_hash in names:
        tiers.decisions.save(block_hash, 0)
        tiers.settle()
    on_disk = [it for it in names if tiers.decisions.place(it) is CacheTier.DISK]
    assert len(on_disk) == 6
    first = tiers.decisions.read(on_disk)
    assert tiers.decisions.read(on_disk) == first  # and not two more
    assert not tiers.decisions.is_read(first)
    tiers.settle()
    assert tiers.num_reads == 2
    assert tiers.decisions.is_read(first)
    assert [tiers.decisions.place(it) for it in on_disk[:3]] == [CacheTier.HOST, CacheTier.HOST, CacheTier.DISK]


def test_changes_say_where_a_block_is_now() -> None:
    tiers = TokenTiers(1, 1)
    pool = BlockPool(1, tiers.decisions)
    tiers.memory = Bench(tiers=None).memory

    def take(text: str) -> None:
        (block,) = pool.allocate(1) or []
        pool.cache(block, name(text))
        pool.release([block])

    take("a")
    assert pool.moves.take() == CacheChanges((name("a"),), ())
    take("b")
    assert pool.moves.take() == CacheChanges((name("b"),), (name("a"),), host=(name("a"),))
    tiers.settle()
    assert pool.moves.take() == CacheChanges((), ())  # on the disk too, and still in the host
    take("c")
    assert pool.moves.take() == CacheChanges((name("c"),), (name("b"), name("a")), host=(name("b"),), disk=(name("a"),))
    assert pool.acquire([name("b")], 1) == ([0], [])  # the host's one slot is b's, so c is gone
    assert pool.moves.take() == CacheChanges((name("b"),), (name("c"),))


def test_what_is_about_to_be_loaded_is_not_given_up_for_what_its_blocks_held() -> None:
    """The host holds just the run; the device's blocks find no room there."""
    tiers = TokenTiers(2)
    pool = BlockPool(2, tiers.decisions)
    tiers.memory = Bench(tiers=None).memory
    for texts in (("a", "b"), ("c", "d")):
        blocks = pool.allocate(2) or []
        for block, text in zip(blocks, texts, strict=True):
            pool.cache(block, name(text))
            tiers.memory.slots[block, 0] = ord(text)
        pool.release(blocks)
    taken = pool.acquire([name("a"), name("b")], 2)
    assert taken is not None
    hits, fresh = taken
    assert [tiers.memory.slots[block, 0] for block in hits] == [ord("a"), ord("b")]
    assert (fresh, pool.place(name("c")), pool.place(name("d"))) == ([], None, None)
    pool.check()


def test_the_walks_have_hits_in_every_tier() -> None:
    seen: Counter[str] = walk_all(range(1, 61, 2))
    assert all(seen[f"{tier} hits"] > 10 for tier in CacheTier), seen


# --- planted bugs ---


def skip_the_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TokenTiers, "is_intact", lambda self, slot, data: True)


def fill_the_wrong_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is found one slot beside the one that it was copied to."""
    insert = SlotTable.insert

    def beside(self: SlotTable, block_hash: BlockHash, slot: int) -> None:
        insert(self, block_hash, (slot + 1) % self._num_slots)

    monkeypatch.setattr(SlotTable, "insert", beside)


def keep_a_name_after_its_slot_is_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host gives the oldest slot away and goes on finding its block there."""
    take = CacheTiers._take_host_slot

    def forget_to_forget(self: CacheTiers) -> int | None:
        slot_of = dict(self._host._slot_of)
        slot = take(self)
        for block_hash in slot_of.keys() - self._host._slot_of.keys():
            self._host._slot_of[block_hash] = slot_of[block_hash]
        return slot

    monkeypatch.setattr(CacheTiers, "_take_host_slot", forget_to_forget)


def save_when_it_is_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a block held is looked for in the block that came after it."""
    save = TokenTiers.save

    def late(self: TokenTiers, block: int, slot: int) -> None:
        save(self, (block + 1) % self.memory.pool.num_blocks, slot)

    monkeypatch.setattr(TokenTiers, "save", late)


def give_up_what_is_about_to_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CacheTiers, "keep", lambda self, hashes: None)


def forget_whose_read_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of one read are taken for those of another."""
    was_read = CacheTiers.was_read
    before: list[DiskRead] = []

    def mixed(self: CacheTiers, read: DiskRead, *, intact: bool) -> int | None:
        before.append(read)
        slot = was_read(self, read, intact=intact)
        if slot is not None and len(before) > 1 and before[-2].block_hash in self._host:
            return self._host.slot(before[-2].block_hash)
        return slot

    monkeypatch.setattr(CacheTiers, "was_read", mixed)


@pytest.mark.parametrize(
    "plant",
    [
        skip_the_checksum,
        fill_the_wrong_slot,
        keep_a_name_after_its_slot_is_overwritten,
        save_when_it_is_too_late,
        give_up_what_is_about_to_be_loaded,
        forget_whose_read_it_was,
    ],
)
def test_the_walks_find_a_planted_bug(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, StaleRead, KeyError, InvariantBroken)):
        for seed in range(1, 200, 2):
            walk(seed)
