"""Which addresses processes listen on, from /proc: no tool needed, nothing hidden by a name."""

from __future__ import annotations

import ipaddress
import os
import struct
from collections.abc import Iterable
from pathlib import Path

LISTEN = "0A"  # TCP_LISTEN, include/net/tcp_states.h


def listening_addresses(pids: Iterable[int]) -> set[str]:
    """IP addresses that any of the processes has a listening TCP socket on."""
    inodes = {inode for pid in pids for inode in _socket_inodes(pid)}
    found: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and fields[9] in inodes:
                found.add(_address(fields[1].partition(":")[0]))
    return found


def is_loopback(address: str) -> bool:
    """Also for an IPv4 loopback address in its IPv6 form."""
    parsed = ipaddress.ip_address(address)
    mapped = getattr(parsed, "ipv4_mapped", None)
    return (mapped or parsed).is_loopback


def _socket_inodes(pid: int) -> set[str]:
    inodes = set()
    try:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(descriptor)
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    except OSError:
        pass  # it ended meanwhile
    return inodes


def _address(text: str) -> str:
    """The kernel prints each 32-bit word of the address in host order."""
    words = [int(text[start : start + 8], 16) for start in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(struct.pack("=I", word) for word in words)))
