"""Ports for servers that tests start a little later."""

from __future__ import annotations

import random
import socket

BELOW_EPHEMERAL = range(10_000, 32_000)  # no connection of another test's cluster takes one of these meanwhile


def free_ports(count: int) -> list[int]:
    """Different ports of 127.0.0.1 that nobody listens on."""
    found: list[int] = []
    while len(found) < count:
        port = random.choice(BELOW_EPHEMERAL)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found
