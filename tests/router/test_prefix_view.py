"""What a router believes of its workers' caches, fed by the real pools and feeds over a stream that may fail."""

from __future__ import annotations

import itertools
import random
from collections import deque

import pytest

from cluster.worker import cache_feed
from cluster.worker.cache_feed import CacheFeed, packed
from core.blocks import CacheTier
from core.identity import BlockHash, pack_keys, unpack_keys
from core.messages import CacheEvents
from engine.block_pool import BlockPool
from router.prefix_view import ASK_AGAIN_S, PrefixView, blocks_below, blocks_held, longest_on_device
from tests.engine.scheduler_bench import Bench
from tests.engine.token_tiers import TokenTiers

NUM_BLOCKS = 12
NUM_TIER_BLOCKS = 4 + 8  # of every third worker
NUM_SEEDS = 300


def block_hash(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "little"))


def keys(*numbers: int) -> bytes:
    return pack_keys(map(block_hash, numbers))


class Worker:
    """A cache that changes at random, and its stream to the one router."""

    def __init__(self, slot: int, rng: random.Random) -> None:
        self.slot = slot
        self.rng = rng
        self.tiers = TokenTiers(4, 8) if slot == 2 else TokenTiers(0)
        self.tiers.memory = MEMORY
        self.pool = BlockPool(NUM_BLOCKS, self.tiers.decisions)
        self.feed = CacheFeed()
        self.wire: deque[CacheEvents] = deque()

    def compute(self) -> None:
        """Cache a few of few blocks; with few places, that evicts others; some are written to the disk, or read."""
        self.pool.fetch([block_hash(self.rng.randrange(30))])
        self.tiers.io()
        for number in self.rng.sample(range(30), self.rng.randrange(1, 4)):
            if (taken := self.pool.acquire([block_hash(number)], 1)) is not None:
                hits, fresh = taken
                for block in fresh:
                    self.pool.cache(block, block_hash(number))
                self.pool.release(hits + fresh)

    def say(self) -> None:
        events = self.feed.next(packed(self.pool.moves.take()), self.pool)
        if events is not None:
            self.wire.append(events)

    @property
    def cached(self) -> dict[int, CacheTier | None]:
        hashes = self.pool.all_hashes()
        return dict(zip(unpack_keys(pack_keys(hashes)), map(self.pool.place, hashes), strict=True))


MEMORY = Bench().memory  # whose tokens nobody looks at


def believed(view: PrefixView, worker: Worker) -> dict[int, CacheTier]:
    bit = 1 << worker.slot

    def tier(key: int) -> CacheTier:
        on_host, on_disk = view._host.get(key, 0) & bit, view._disk.get(key, 0) & bit
        assert not (on_host and on_disk)
        return CacheTier.HOST if on_host else CacheTier.DISK if on_disk else CacheTier.DEVICE

    return {key: tier(key) for key, holders in view._holders.items() if holders & bit}


def walk(seed: int) -> tuple[PrefixView, dict[int, Worker], int]:
    """Stores, evictions, lost, doubled and overtaking events, deaths and restarts; then all is said and heard."""
    rng = random.Random(seed)
    view, workers, now = PrefixView(), {slot: Worker(slot, rng) for slot in range(3)}, 0.0
    for slot in workers:
        view.join(slot, NUM_BLOCKS + NUM_TIER_BLOCKS)

    def hear(worker: Worker, events: CacheEvents | None) -> None:
        if view.hear(worker.slot, events, now):
            worker.feed.begin_again()

    for _ in range(150):
        now += rng.random()
        worker = workers[rng.randrange(3)]
        match rng.randrange(8):
            case 0 | 1 | 2:
                worker.compute()
            case 3 | 4:
                worker.say()
            case 5 if worker.wire:
                hear(worker, worker.wire.popleft())
            case 6 if worker.wire:
                match rng.randrange(3):
                    case 0:
                        worker.wire.popleft()
                    case 1:
                        worker.wire.append(worker.wire[0])
                    case 2:
                        worker.wire.rotate(1)
            case 7 if rng.random() < 0.2:
                view.leave(worker.slot)
                view.join(worker.slot, NUM_BLOCKS + NUM_TIER_BLOCKS)
                workers[worker.slot] = Worker(worker.slot, rng)
        for each in workers.values():
            num_believed = sum(holders >> each.slot & 1 for holders in view._holders.values())
            assert num_believed <= NUM_BLOCKS + NUM_TIER_BLOCKS
    num_gaps = view.num_gaps
    for worker in workers.values():
        for _ in range(12):
            now += ASK_AGAIN_S
            worker.compute()
            worker.say()
            while worker.wire:
                hear(worker, worker.wire.popleft())
        worker.say()
        while worker.wire:
            hear(worker, worker.wire.popleft())
    return view, workers, num_gaps


def check(view: PrefixView, workers: dict[int, Worker]) -> None:
    for worker in workers.values():
        assert believed(view, worker) == worker.cached
        told = view._told[worker.slot]
        assert told.keys == worker.cached.keys()
        assert told.below == {key for key, tier in worker.cached.items() if tier is not CacheTier.DEVICE}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_feed, "PIECE_BLOCKS", 3)


def test_in_the_end_the_view_is_what_is_cached_whatever_was_lost_on_the_way() -> None:
    num_gaps = 0
    for seed in range(NUM_SEEDS):
        view, workers, gaps = walk(seed)
        check(view, workers)
        num_gaps += gaps
    assert num_gaps > NUM_SEEDS  # else this proves little


def ignore_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever comes is taken for the next event."""

    def hear(self: PrefixView, slot: int, events: CacheEvents | None, now: float) -> bool:
        if events is not None:
            self._take(slot, self._told[slot], events)
        return False

    monkeypatch.setattr(PrefixView, "hear", hear)


def keep_the_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A place's next life is believed to cache what its last one did."""
    monkeypatch.setattr(PrefixView, "leave", lambda self, slot: None)


def snapshot_without_a_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is evicted before its piece goes out is said to be cached, after the event that said otherwise."""
    place = BlockPool.place
    monkeypatch.setattr(BlockPool, "place", lambda self, block_hash: place(self, block_hash) or CacheTier.DEVICE)


def forget_to_lift(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is on the device again is believed to be in a tier below still."""
    monkeypatch.setattr(PrefixView, "_lift", lambda self, slot, told, keys: None)


@pytest.mark.parametrize("plant", [ignore_gaps, keep_the_dead, snapshot_without_a_second_look, forget_to_lift])
def test_the_walks_find_a_planted_bug(plant, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    plant(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        for seed in range(NUM_SEEDS):
            view, workers, _gaps = walk(seed)
            check(view, workers)


def held(view: PrefixView, prompt: range, num_slots: int) -> list[int]:
    runs = view.runs(unpack_keys(keys(*prompt)))
    return [blocks_held(runs, slot) for slot in range(num_slots)]


def test_runs_are_what_each_worker_holds_without_a_hole() -> None:
    view = PrefixView()
    for slot, numbers in enumerate([range(5), range(2), (0, 1, 3, 4), range(1, 5), ()]):
        view.join(slot, 10)
        view.hear(slot, CacheEvents(1, keys(*numbers), b"", reset=True), 0.0)
    assert held(view, range(6), 5) == [5, 2, 2, 0, 0]
    assert held(view, range(4), 5) == [4, 2, 2, 0, 0]
    assert held(view, range(9, 12), 5) == [0] * 5
    assert held(view, range(0), 5) == [0] * 5


def test_runs_agree_with_a_look_into_each_cache() -> None:
    rng = random.Random(5)
    for _ in range(50):
        view, caches = PrefixView(), [{n for n in range(8) if rng.random() < 0.85} for _ in range(40)]
        for slot, cache in enumerate(caches):
            view.join(slot, 8)
            view.hear(slot, CacheEvents(1, keys(*cache), b"", reset=True), 0.0)
        naive = [sum(1 for _ in itertools.takewhile(cache.__contains__, range(8))) for cache in caches]
        assert held(view, range(8), 40) == naive


def test_a_gap_asks_once_and_again_only_when_no_snapshot_comes() -> None:
    view = PrefixView()
    view.join(0, 10)
    assert not view.hear(0, None, 0.0)  # of an older release, perhaps: it says nothing of its cache
    assert not view.hear(0, CacheEvents(1, keys(1), b"", reset=True), 0.0)
    assert view.hear(0, CacheEvents(3, keys(3), b""), 1.0)
    assert held(view, range(1, 2), 1) == [0]
    assert not view.hear(0, CacheEvents(4, keys(4), b""), 1.5)
    assert view.hear(0, None, 1.0 + ASK_AGAIN_S)
    assert not view.hear(0, CacheEvents(5, keys(1, 2), b"", reset=True), 4.0)
    assert held(view, range(1, 3), 1) == [2]


def test_a_worker_that_says_more_than_it_can_hold_is_not_believed() -> None:
    view = PrefixView()
    view.join(0, 2)
    assert not view.hear(0, CacheEvents(1, keys(1, 2), b"", reset=True), 0.0)
    assert view.num_keys == 2
    assert view.hear(0, CacheEvents(2, keys(3), b""), 0.0)
    assert view.num_keys == 0


def test_runs_know_tiers() -> None:
    """Worker 0 has blocks 0 to 5: two on the device, two in the host, two on the disk; worker 1 all on the device."""
    view = PrefixView()
    for slot in (0, 1, 2):
        view.join(slot, 10)
    view.hear(1, CacheEvents(1, keys(*range(4)), b"", reset=True), 0.0)
    assert not view.tiered
    view.hear(0, CacheEvents(1, keys(0, 1), b"", True, keys(2, 3), keys(4, 5)), 0.0)
    assert view.tiered
    runs = view.runs(unpack_keys(keys(*range(8))))
    assert [blocks_held(runs, slot) for slot in (0, 1, 2)] == [6, 4, 0]
    assert [blocks_below(runs, slot) for slot in (0, 1, 2)] == [(2, 2), (0, 0), (0, 0)]
    assert longest_on_device(runs).num_blocks == 4
    assert longest_on_device(runs).holders == 0b10
    view.hear(0, CacheEvents(2, keys(2, 3, 4, 5), b""), 0.0)
    assert not view.tiered
    runs = view.runs(unpack_keys(keys(*range(8))))
    assert (blocks_held(runs, 0), blocks_below(runs, 0)) == (6, (0, 0))


def test_runs_of_tiers_agree_with_a_look_into_each_cache() -> None:
    rng = random.Random(6)
    for _ in range(50):
        view, caches = PrefixView(), []
        for slot in range(20):
            places = {n: rng.choice([CacheTier.DEVICE, *CacheTier]) for n in range(8) if rng.random() < 0.85}
            caches.append(places)
            said = {tier: keys(*(n for n in places if places[n] is tier)) for tier in CacheTier}
            view.join(slot, 8)
            event = CacheEvents(1, said[CacheTier.DEVICE], b"", True, said[CacheTier.HOST], said[CacheTier.DISK])
            view.hear(slot, event, 0.0)
        runs = view.runs(unpack_keys(keys(*range(8))))
        longest = 0
        for slot, places in enumerate(caches):
            held = list(itertools.takewhile(places.__contains__, range(8)))
            assert blocks_held(runs, slot) == len(held)
            below = tuple(sum(places[n] is tier for n in held) for tier in (CacheTier.HOST, CacheTier.DISK))
            assert blocks_below(runs, slot) == below
            on_device = itertools.takewhile(lambda n, places=places: places.get(n) is CacheTier.DEVICE, range(8))
            longest = max(longest, sum(1 for _ in on_device))
        assert longest_on_device(runs).num_blocks == longest
