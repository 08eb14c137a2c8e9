"""Where a worker runs and which network devices it uses: checked and set before it loads anything. Linux, by sysfs."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Final

from core.errors import BadRequest

SYSFS: Final = Path("/sys")
EVERY_INTERFACE: Final = "all"  # UCX's own word


def require_interfaces(kv_interface: str, sysfs: Path = SYSFS) -> None:
    """Each must be a network interface of this host, or a port of an RDMA device, "mlx5_0:1".

    Raises: BadRequest: one is not, or is named by a pattern, which could silently match nothing.
    """
    interfaces = [name for _, name in socket.if_nameindex()]
    ports = [f"{port.parts[-3]}:{port.name}" for port in sysfs.glob("class/infiniband/*/ports/*")]
    for name in kv_interface.split(","):
        if name not in (*interfaces, *ports, EVERY_INTERFACE):
            raise BadRequest("kv_interface", f"there is no {name!r} here, but {', '.join(sorted(interfaces + ports))}")


def run_on_numa_node(node: int, sysfs: Path = SYSFS) -> None:
    """Bind every thread of this process, and so those that they start, to a NUMA node's cores. Memory follows: Linux
    takes it from the node of the core that first writes to it.

    Raises: BadRequest: there is no such node, or this process may use none of its cores.
    """
    folder = sysfs / "devices/system/node"
    listed = folder / f"node{node}/cpulist"
    if not listed.exists():
        nodes = sorted(int(path.name.removeprefix("node")) for path in folder.glob("node[0-9]*"))
        raise BadRequest("numa_nodes", f"there is no node {node} here, but {', '.join(map(str, nodes))}")
    cores = _parse_cores(listed.read_text()) & os.sched_getaffinity(0)
    if not cores:
        raise BadRequest("numa_nodes", f"this process may use no core of node {node}")
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


def _parse_cores(text: str) -> set[int]:
    """Of "0-3,8": cpuset(7), list format."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    return cores
