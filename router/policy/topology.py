"""How near two workers are by what they say of themselves: where nothing is measured yet, and among equals."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Final

from core.membership import WorkerInfo


class Nearness(IntEnum):
    """FAR: on different hosts, or not known."""

    FAR = 0
    HOST = 1
    NVLINK = 2

    def __str__(self) -> str:
        return self.name.lower()


# Gigabytes/s of a path that no probe has measured. By order of magnitude: fourth-generation NVLink has 450 a direction
# (NVIDIA H100 data sheet), memory of a host about 10 a core (bench/kv_transfer.py), 10-gigabit Ethernet 1.25.
ASSUMED_GBPS: Final[Mapping[Nearness, float]] = {Nearness.NVLINK: 100.0, Nearness.HOST: 10.0, Nearness.FAR: 1.0}


def nearness(one: WorkerInfo, other: WorkerInfo) -> Nearness:
    if one.nvlink_domain and one.nvlink_domain == other.nvlink_domain:
        return Nearness.NVLINK
    host = host_of(one)
    return Nearness.HOST if host and host == host_of(other) else Nearness.FAR


def host_of(info: WorkerInfo) -> str:
    """Empty: not known."""
    return info.address.rpartition(":")[0]


def neighbourhood(info: WorkerInfo) -> str:
    """Workers that have this in common are near each other; empty: not known."""
    return info.nvlink_domain or host_of(info)
