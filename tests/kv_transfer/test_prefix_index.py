"""The shared prefix index against a real Valkey, healthy, frozen, dead and back."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import redis
from transport_ends import until
from valkey_process import Valkey, valkey

from core.identity import Adapter, BlockHash, block_hashes, namespace
from core.membership import WorkerRef
from kv_transfer.prefix_index import PrefixHit, RedisPrefixIndex

A, B, C = (WorkerRef(f"worker-{name}", "life-1") for name in "abc")
EMPTY = PrefixHit()
Open = Callable[..., RedisPrefixIndex]

_digests = itertools.count()


def chain(num_blocks: int, root: bytes = b"root") -> list[BlockHash]:
    return block_hashes(root, range(num_blocks * 4), 4)


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Valkey]:
    with valkey() as server:
        yield server


@pytest.fixture
def own_server() -> Iterator[Valkey]:
    with valkey() as server:
        yield server


@pytest.fixture
async def opened() -> AsyncIterator[Open]:
    """Opens indexes of one identity (unless told otherwise), and closes them."""
    indexes: list[RedisPrefixIndex] = []
    own_digest = next(_digests).to_bytes(32, "little")

    def open_index(
        server: Valkey, ref: WorkerRef, digest: bytes = own_digest, ttl_s: float = 60.0, timeout_s: float = 2.0
    ) -> RedisPrefixIndex:
        index = RedisPrefixIndex(server.url, ref, digest, ttl_s, timeout_s, write_timeout_s=2.0, backoff_s=0.05)
        indexes.append(index)
        return index

    yield open_index
    for index in indexes:
        await index.close()


async def test_a_block_is_found_by_others_only(shared_server: Valkey, opened: Open) -> None:
    ours, theirs = opened(shared_server, A), opened(shared_server, B)
    assert await theirs.lookup(chain(3)) == EMPTY
    await ours.announce(chain(3))
    assert await theirs.lookup(chain(3)) == PrefixHit(3, (A,))
    assert await ours.lookup(chain(3)) == EMPTY
    assert await theirs.lookup([]) == EMPTY
    assert await theirs.lookup(chain(3, root=b"other tenant")) == EMPTY
    assert theirs.stats.hit_blocks == 3
    assert theirs.stats.failures == 0


async def test_another_identity_finds_nothing(shared_server: Valkey, opened: Open) -> None:
    ours = opened(shared_server, A, digest=b"\x01" * 32)
    same, other = opened(shared_server, B, digest=b"\x01" * 32), opened(shared_server, B, digest=b"\x02" * 32)
    await ours.announce(chain(2))
    assert await same.lookup(chain(2)) == PrefixHit(2, (A,))
    assert await other.lookup(chain(2)) == EMPTY


async def test_an_adapter_s_blocks_are_found_for_that_adapter_only(shared_server: Valkey, opened: Open) -> None:
    ours, theirs = opened(shared_server, A), opened(shared_server, B)

    def blocks(adapter: Adapter | None) -> list[BlockHash]:
        return chain(3, root=namespace(b"identity", "tenant", "", adapter))

    poet = Adapter("poet", "d1")
    await ours.announce(blocks(poet))
    assert await theirs.lookup(blocks(poet)) == PrefixHit(3, (A,))
    assert await theirs.lookup(blocks(None)) == EMPTY
    assert await theirs.lookup(blocks(Adapter("poet", "d2"))) == EMPTY


async def test_the_run_ends_where_no_holder_has_it_whole(shared_server: Valkey, opened: Open) -> None:
    a, b, c = (opened(shared_server, ref) for ref in (A, B, C))
    blocks = chain(8)
    await a.announce(blocks[:5])
    await a.announce(blocks[6:])
    assert await c.lookup(blocks) == PrefixHit(5, (A,))
    await b.announce(blocks[:3])
    assert await c.lookup(blocks[:3]) == PrefixHit(3, (A, B))
    assert await c.lookup(blocks) == PrefixHit(5, (A,))
    await b.announce(blocks[4:])  # between them they hold all, but neither holds the run whole
    assert await c.lookup(blocks) == PrefixHit(5, (A,))
    assert await c.lookup(blocks[5:]) == PrefixHit(3, (B,))
    await a.withdraw(blocks[:1])
    assert await c.lookup(blocks) == PrefixHit(3, (B,))


async def test_withdraw(shared_server: Valkey, opened: Open) -> None:
    a, b, c = (opened(shared_server, ref) for ref in (A, B, C))
    await a.announce(chain(4))
    await b.announce(chain(4))
    await a.withdraw(chain(4)[2:])
    assert await c.lookup(chain(4)) == PrefixHit(4, (B,))
    await b.withdraw(chain(4))
    assert await c.lookup(chain(4)) == PrefixHit(2, (A,))


async def test_purge_forgets_one_incarnation(shared_server: Valkey, opened: Open) -> None:
    reborn = WorkerRef(A.worker_id, "life-2")
    old, new, c = (opened(shared_server, ref) for ref in (A, reborn, C))
    blocks = chain(2500)
    await old.announce(blocks)
    await new.announce(blocks[:10])
    assert await c.lookup(blocks) == PrefixHit(2500, (A,))
    await c.purge(A)
    assert await c.lookup(blocks) == PrefixHit(10, (reborn,))
    await c.purge(reborn)
    assert await c.lookup(blocks) == EMPTY


async def test_nothing_is_left_after_a_purge(own_server: Valkey, opened: Open) -> None:
    index = opened(own_server, A)
    await index.announce(chain(1500))
    with redis.Redis(port=own_server.port) as client:
        assert client.dbsize() == 1501
        assert all(client.pttl(key) > 0 for key in client.keys("*"))
        await index.purge(A)
        assert client.dbsize() == 0


async def test_entries_expire_by_holder(shared_server: Valkey, opened: Open) -> None:
    """A holder that stopped announcing is forgotten even where another keeps the key alive."""
    brief, lasting, c = opened(shared_server, A, ttl_s=0.3), opened(shared_server, B), opened(shared_server, C)
    await brief.announce(chain(3))
    assert await c.lookup(chain(3)) == PrefixHit(3, (A,))
    await lasting.announce(chain(3)[:1])
    async with asyncio.timeout(5):
        while (await c.lookup(chain(3))).holders != (B,):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert await c.lookup(chain(3)) == PrefixHit(1, (B,))
    await brief.announce(chain(3))
    assert await c.lookup(chain(3)) == PrefixHit(3, (A,))


async def test_a_foreign_entry_costs_the_hit(own_server: Valkey, opened: Open) -> None:
    a, c = opened(own_server, A), opened(own_server, C)
    await a.announce(chain(1))
    with redis.Redis(port=own_server.port) as client:
        (key,) = client.keys("kv:*:" + chain(1)[0].hex())
        client.hset(key, "not a worker", 1 << 50)
    assert await c.lookup(chain(1)) == EMPTY
    assert c.stats.failures == 1


async def test_a_long_lookup_is_one_round_trip(own_server: Valkey, opened: Open) -> None:
    a, c = opened(own_server, A), opened(own_server, C)
    blocks = chain(4000)
    await a.announce(blocks)
    await c.lookup(blocks[:1])
    with redis.Redis(port=own_server.port) as client:
        client.config_resetstat()
        assert await c.lookup(blocks) == PrefixHit(4000, (A,))
        calls = {name: stats["calls"] for name, stats in client.info("commandstats").items()}
    from_scripts = {"cmdstat_hgetall", "cmdstat_time"}
    ours = {name: count for name, count in calls.items() if name not in from_scripts | {"cmdstat_config|resetstat"}}
    assert ours == {"cmdstat_evalsha": 1}


async def test_a_frozen_server_costs_one_bound_and_then_nothing(own_server: Valkey, opened: Open) -> None:
    a, c = opened(own_server, A), opened(own_server, C, timeout_s=0.3)
    await a.announce(chain(2))
    assert await c.lookup(chain(2)) == PrefixHit(2, (A,))
    own_server.stop()
    started_s = time.monotonic()
    assert await c.lookup(chain(2)) == EMPTY
    assert time.monotonic() - started_s < 1.0
    assert c.away
    started_s = time.monotonic()
    for _ in range(100):
        assert await c.lookup(chain(2)) == EMPTY
    await c.announce(chain(2))
    await c.withdraw(chain(2))
    await c.purge(A)
    assert time.monotonic() - started_s < 0.2
    assert c.stats.failures == 1
    own_server.go_on()
    await until(lambda: not c.away)
    assert await c.lookup(chain(2)) == PrefixHit(2, (A,))


async def test_a_dead_server_and_its_return(own_server: Valkey, opened: Open) -> None:
    a, c = opened(own_server, A), opened(own_server, C)
    await a.announce(chain(2))
    assert await c.lookup(chain(2)) == PrefixHit(2, (A,))
    own_server.kill()
    assert await c.lookup(chain(2)) == EMPTY
    await a.announce(chain(2))
    assert (a.away, c.away) == (True, True)
    own_server.start_again()
    await until(lambda: not a.away and not c.away)
    assert await c.lookup(chain(2)) == EMPTY  # it came back empty
    await a.announce(chain(2))
    assert await c.lookup(chain(2)) == PrefixHit(2, (A,))


async def test_a_server_that_never_was(opened: Open, own_server: Valkey) -> None:
    own_server.kill()
    index = opened(own_server, A)
    assert await index.lookup(chain(2)) == EMPTY
    assert index.away
    await index.close()
    await index.close()
