"""The shared prefix index in a real Cluster, and behind a real Sentinel whose primary is killed."""

from __future__ import annotations

from pathlib import Path

from transport_ends import until
from valkey_process import valkey
from valkey_sentinel import watched

from core.identity import block_hashes
from core.membership import WorkerRef
from kv_transfer.prefix_index import PrefixHit, RedisPrefixIndex

A, B = WorkerRef("worker-a", "life-1"), WorkerRef("worker-b", "life-1")
HASHES = block_hashes(b"root", range(12), 4)


def open_index(url: str, ref: WorkerRef) -> RedisPrefixIndex:
    return RedisPrefixIndex(url, ref, b"\x01" * 32, 60.0, timeout_s=5.0, write_timeout_s=5.0, backoff_s=0.05)


async def test_a_cluster_serves_the_index() -> None:
    with valkey(cluster=True) as server:
        ours, theirs = open_index(server.url, A), open_index(server.url, B)
        await ours.announce(HASHES)
        assert await theirs.lookup(HASHES) == PrefixHit(3, (A,))
        await theirs.purge(A)
        assert await theirs.lookup(HASHES) == PrefixHit()
        assert (ours.stats.failures, theirs.stats.failures) == (0, 0)
        await ours.close()
        await theirs.close()


async def test_after_a_failover_the_index_is_at_the_new_primary(tmp_path: Path) -> None:
    with watched(tmp_path) as servers:
        ours, theirs = open_index(servers.url, A), open_index(servers.url, B)
        await ours.announce(HASHES)
        assert await theirs.lookup(HASHES) == PrefixHit(3, (A,))
        old_port = servers.primary_port()
        servers.primary.kill()
        assert await theirs.lookup(HASHES) == PrefixHit()
        await until(lambda: servers.primary_port() != old_port, bound_s=30.0)
        await until(lambda: not theirs.away, bound_s=10.0)
        await ours.announce(HASHES)
        await until(lambda: not ours.away, bound_s=10.0)
        await ours.announce(HASHES)
        assert await theirs.lookup(HASHES) == PrefixHit(3, (A,))
        await ours.close()
        await theirs.close()
