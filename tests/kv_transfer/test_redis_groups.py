"""The shared prefix index in a real Cluster, behind a real Sentinel whose primary is killed, and behind TLS."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import valkey_process
from tls_relay import certificate, tls_before
from transport_ends import until
from valkey_process import valkey
from valkey_sentinel import watched

from cluster.free_ports import can_listen, free_ports
from core.identity import block_hashes
from core.membership import WorkerRef
from kv_transfer.bounded_redis import redis_lack
from kv_transfer.prefix_index import PrefixHit, RedisPrefixIndex

HOST = "127.0.0.1"
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
        server.kill()
        stranger = open_index(server.url, A)
        for index in (ours, theirs, stranger):  # that knows its nodes, or not yet
            assert await index.lookup(HASHES) == PrefixHit() and index.away
            await index.close()


def test_a_cluster_starts_whatever_listens_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """10,000 above its port, where Valkey's own choice for its bus would be: this failed one CI run of many."""
    port, bus_port, *_ = (port for port in free_ports(20) if can_listen(HOST, port + 10_000))
    monkeypatch.setattr(valkey_process, "free_ports", lambda _count: [port, bus_port])
    with socket.create_server((HOST, port + 10_000)), valkey(cluster=True) as server:
        assert server.port == port and server.process.poll() is None


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


@pytest.mark.parametrize("scheme", ["rediss", "rediss+cluster"])
async def test_by_tls_the_index_is_where_the_named_ca_says(scheme: str, tmp_path: Path) -> None:
    (tls_port,) = free_ports(1)
    other_file, _ = certificate(tmp_path / "other")
    url = f"{scheme}://127.0.0.1:{tls_port}"
    with valkey(cluster=scheme.endswith("cluster"), announced_port=tls_port) as server:
        async with tls_before(server.port, tls_port, tmp_path / "server") as file:
            ours, theirs = (open_index(f"{url}?ssl_ca_certs={file}", ref) for ref in (A, B))
            await ours.announce(HASHES)
            assert await theirs.lookup(HASHES) == PrefixHit(3, (A,))
            await ours.close()
            await theirs.close()
            assert await redis_lack(f"{url}?ssl_ca_certs={file}", 5.0) == ""
            for query in ("", f"?ssl_ca_certs={other_file}"):
                assert "CERTIFICATE_VERIFY_FAILED" in await redis_lack(url + query, 5.0)


async def test_why_a_redis_cannot_be_used_is_said_without_its_password() -> None:
    with valkey() as server:
        assert await redis_lack(server.url, 5.0) == ""
        lack = await redis_lack(f"redis://nobody:secret@127.0.0.1:{server.port}/0", 5.0)
        assert "password" in lack and "secret" not in lack
        server.stop()
        assert await redis_lack(server.url, 0.1) != ""
        server.kill()
        assert "connecting to" in await redis_lack(server.url, 5.0)
