"""Where a worker runs, and that devices and nodes which are not there are refused by name."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from cluster.worker.affinity import require_interfaces, run_on_numa_node
from core.errors import BadRequest


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """Of a host with an RDMA device of two ports, and two nodes: of the lowest core that this process may use, and of
    cores that nobody has."""
    for port in (1, 2):
        (tmp_path / f"class/infiniband/mlx5_0/ports/{port}").mkdir(parents=True)
    for node, cores in ((0, f"{min(os.sched_getaffinity(0))}"), (3, "7000-7002,7010")):
        (tmp_path / f"devices/system/node/node{node}").mkdir(parents=True)
        (tmp_path / f"devices/system/node/node{node}/cpulist").write_text(f"{cores}\n")
    return tmp_path


@pytest.fixture
def any_core() -> Iterator[set[int]]:
    """This process's cores, given back to each thread afterwards."""
    before = os.sched_getaffinity(0)
    yield before
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread), before)


@pytest.mark.parametrize("names", ["lo", "all", "mlx5_0:2", "mlx5_0:1,lo"])
def test_devices_of_this_host_are_taken(sysfs: Path, names: str) -> None:
    require_interfaces(names, sysfs)


@pytest.mark.parametrize("names", ["", "nowhere0", "lo,nowhere0", "mlx5_0", "mlx5_0:3", "mlx5_1:1", "mlx5_*", "lo, lo"])
def test_a_device_that_is_not_here_is_refused(sysfs: Path, names: str) -> None:
    with pytest.raises(BadRequest, match=r"lo, mlx5_0:1, mlx5_0:2") as refused:
        require_interfaces(names, sysfs)
    assert refused.value.field == "kv_interface"


def test_every_thread_runs_on_the_nodes_cores(sysfs: Path, any_core: set[int]) -> None:
    seen: list[set[int]] = []
    bound = threading.Event()
    older = threading.Thread(target=lambda: (bound.wait(10.0), seen.append(os.sched_getaffinity(0))))
    older.start()
    run_on_numa_node(0, sysfs)
    bound.set()
    older.join()
    assert seen == [{min(any_core)}]
    assert os.sched_getaffinity(0) == {min(any_core)}


@pytest.mark.parametrize(("node", "reason"), [(1, "no node 1 here, but 0, 3"), (3, "no core of node 3")])
def test_a_node_that_is_not_ours_is_refused(sysfs: Path, any_core: set[int], node: int, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason) as refused:
        run_on_numa_node(node, sysfs)
    assert refused.value.field == "numa_nodes"
    assert os.sched_getaffinity(0) == any_core
