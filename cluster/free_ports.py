"""Ports for servers that are started a little later."""

from __future__ import annotations

import errno
import random
import socket
from itertools import cycle, islice
from typing import Final

# Connections take theirs above (ip_local_port_range), so that none has one of these by the time its server starts.
BELOW_EPHEMERAL: Final = range(10_000, 32_000)
TRIES: Final = 1000

_candidates: Final = cycle(random.sample(BELOW_EPHEMERAL, len(BELOW_EPHEMERAL)))  # so a process gets none twice


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Different ports of `host` that nobody listens on. Raises OSError."""
    found = list(islice((port for port in islice(_candidates, TRIES) if can_listen(host, port)), count))
    if len(found) < count:
        raise OSError(errno.EADDRINUSE, f"of {TRIES} ports on {host}, {len(found)} are free")
    return found


def listen_once(host: str, port: int) -> None:
    """Raises OSError: no server can listen there."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: a port whose last connections are still winding down is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        probe.listen()


def can_listen(host: str, port: int) -> bool:
    """Whether a server can listen there now."""
    try:
        listen_once(host, port)
    except OSError:
        return False
    return True
