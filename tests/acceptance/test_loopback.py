"""Nothing of a cluster listens beyond this machine unless it was told to."""

from __future__ import annotations

from cluster import processes
from tests.acceptance.running_cluster import RunningCluster
from tests.cluster.listening import is_loopback, listening_addresses


def test_everything_listens_on_loopback_only(pair: RunningCluster) -> None:
    """Fronts, registry, workers, Ray, Valkey and UCX. The control that an open socket is found: tests/cluster/."""
    pids = [process.pid for process in processes.descendants(pair.pid)]
    addresses = listening_addresses(pids)
    assert len(pids) > 5 and addresses and all(map(is_loopback, addresses)), addresses
