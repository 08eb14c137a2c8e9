"""How a peer's transfer thread is woken, for which NIXL has nothing: a datagram, of which only the arrival matters.

It may be lost, doubled, late or a stranger's: whoever is woken looks for what came by NIXL, and looks now and then
without being woken.
"""

from __future__ import annotations

import os
import select
import socket
from contextlib import suppress
from typing import Final

BellAddress = tuple[str, int]  # numeric IP address, UDP port

_MOST_RINGS: Final = 64  # taken at once; more are taken next time


class Doorbell:
    """One worker's bell. `wake` may be called from any thread, everything else from one.

    host: address to listen at, on a free port. Raises: OSError: it is not ours.
    """

    def __init__(self, host: str) -> None:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        try:
            self._socket.bind(address)
        except OSError:
            self._socket.close()
            raise
        self._socket.setblocking(False)
        bound = self._socket.getsockname()
        self.address: BellAddress = (bound[0], bound[1])
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = select.poll()
        for descriptor in (self._socket.fileno(), self._woken):
            self._poller.register(descriptor, select.POLLIN)

    def wait(self, timeout_s: float) -> bool:
        """Until a peer rings, `wake` is called, or time is up, rounded up to milliseconds. Whether a peer rang."""
        ready = {descriptor for descriptor, _ in self._poller.poll(timeout_s * 1e3)}
        if self._woken in ready:
            os.eventfd_read(self._woken)
        if self._socket.fileno() not in ready:
            return False
        with suppress(OSError):
            for _ in range(_MOST_RINGS):
                self._socket.recv(1)
        return True

    def wake(self) -> None:
        """End the wait under way, or the next one."""
        os.eventfd_write(self._woken, 1)

    def ring(self, peer: BellAddress) -> None:
        """Wake a peer; one that cannot be reached so finds by itself what came."""
        with suppress(OSError):
            self._socket.sendto(b"", peer)

    def close(self) -> None:
        """No other call may be under way or follow."""
        self._socket.close()
        os.close(self._woken)
