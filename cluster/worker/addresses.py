"""The address that a worker listens on and is called at. Linux, by netdevice(7)."""

from __future__ import annotations

import fcntl
import socket
import struct
from typing import Final

from cluster.worker.config import OWN_ADDRESS, WorkerConfig
from core.errors import BadRequest

SIOCGIFADDR: Final = 0x8915  # linux/sockios.h
IFNAMSIZ: Final = 16  # linux/if.h


def listening_address(config: WorkerConfig) -> str:
    """`worker_host`, or the IPv4 address of the first interface of `kv_interface` that has one.

    Raises: BadRequest: none of them has.
    """
    if config.worker_host != OWN_ADDRESS:
        return config.worker_host
    for name in config.kv_interface.split(","):
        address = _interface_address(name)
        if address is not None:
            return address
    raise BadRequest("kv_interface", f"no interface of {config.kv_interface!r} has an IPv4 address: name worker_host")


def _interface_address(name: str) -> str | None:
    """None: there is no such network interface (an RDMA device is none), or it has no IPv4 address."""
    encoded = name.encode()
    if len(encoded) >= IFNAMSIZ:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", encoded))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])  # ifreq: the name, then a sockaddr_in
