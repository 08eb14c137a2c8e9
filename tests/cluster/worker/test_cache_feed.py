"""What a worker tells its routers of its cache. Against the router's view: tests/router/test_prefix_view.py."""

from __future__ import annotations

import pytest

from cluster.worker import cache_feed, router_streams
from cluster.worker.router_streams import RouterStream, RouterStreams
from core.identity import BlockHash, pack_keys
from core.membership import WorkerLoad
from core.messages import CacheEvents, StepOutput
from engine.block_pool import BlockPool
from tests.engine.scheduler_bench import Bench
from tests.engine.token_tiers import TokenTiers


def block_hash(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "little"))


def keys(*numbers: int) -> bytes:
    return pack_keys(map(block_hash, numbers))


class Worker:
    def __init__(self, pool: BlockPool | None = None) -> None:
        self.pool = pool or BlockPool(8)
        self.streams = RouterStreams(self.pool, lambda _request_id: True)

    def cache(self, *numbers: int) -> None:
        blocks = self.pool.allocate(len(numbers))
        assert blocks is not None
        for block, number in zip(blocks, numbers, strict=True):
            self.pool.cache(block, block_hash(number))
        self.pool.release(blocks)

    def step(self) -> None:
        self.streams.step((), WorkerLoad(), self.pool.moves.take())


def heard(stream: RouterStream) -> list[CacheEvents | None]:
    found = []
    while not stream.outbox.empty():
        answer = stream.outbox.get_nowait()
        assert isinstance(answer, StepOutput)
        found.append(answer.cache)
    return found


def test_each_router_hears_a_snapshot_and_then_what_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_feed, "PIECE_BLOCKS", 2)
    worker = Worker()
    early, _ = worker.streams.open("a")
    worker.step()
    worker.cache(1, 2, 3)
    worker.step()
    late, _ = worker.streams.open("b")
    worker.step()
    worker.cache(4)
    worker.step()
    worker.step()
    assert heard(early) == [
        CacheEvents(1, b"", b"", reset=True),
        CacheEvents(2, keys(1, 2, 3), b""),
        None,
        CacheEvents(3, keys(4), b""),
        None,
    ]
    assert heard(late) == [CacheEvents(1, keys(1, 2), b"", reset=True), CacheEvents(2, keys(4, 3), b""), None]


def test_a_router_that_does_not_read_is_told_again_when_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_streams, "MAX_UNREAD", 2)
    worker = Worker()
    stream, _ = worker.streams.open("a")
    for number in range(5):
        worker.cache(number)
        worker.step()
    assert heard(stream) == [CacheEvents(1, keys(0), b"", reset=True), CacheEvents(2, keys(1), b""), None, None, None]
    assert worker.streams.behind
    worker.step()
    assert heard(stream) == [CacheEvents(3, keys(0, 1, 2, 3, 4), b"", reset=True)]
    assert not worker.streams.behind


def test_what_leaves_the_device_for_a_tier_is_said_to_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """As evicted too: a router of an earlier release knows no tiers."""
    monkeypatch.setattr(cache_feed, "PIECE_BLOCKS", 2)
    tiers = TokenTiers(1, 8)
    tiers.memory = Bench().memory
    worker = Worker(BlockPool(2, tiers.decisions))
    stream, _ = worker.streams.open("a")
    worker.cache(1, 2)
    worker.step()
    worker.cache(3)
    worker.step()
    tiers.settle()
    worker.cache(4)
    worker.step()
    assert heard(stream) == [
        CacheEvents(1, keys(1, 2), b"", reset=True),
        CacheEvents(2, keys(3), keys(2), host=keys(2)),
        CacheEvents(3, keys(4), keys(1, 2), host=keys(1), disk=keys(2)),
    ]
    late, _ = worker.streams.open("b")
    worker.step()
    worker.step()
    assert heard(late) == [
        CacheEvents(1, keys(3, 4), b"", reset=True),
        CacheEvents(2, b"", b"", host=keys(1), disk=keys(2)),
    ]
