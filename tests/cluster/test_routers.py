"""Something runs with each router for as long as it is there; one that hangs or is gone holds up no other."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from cluster import routers
from cluster.routers import look_up, with_each_router


class Names:
    """A resolver: addresses by host, changed as time goes on; an empty list: the host is not known."""

    def __init__(self, patch: pytest.MonkeyPatch, **hosts: list[str]) -> None:
        self.hosts = hosts
        patch.setattr(routers, "LOOK_UP_EVERY_S", 0.001)
        patch.setattr(asyncio.get_running_loop(), "getaddrinfo", self._getaddrinfo)

    async def _getaddrinfo(self, host: str, port: int, **_: object) -> list[Any]:
        addresses = self.hosts[host]
        if not addresses:
            raise socket.gaierror(socket.EAI_NONAME, "not known")
        families = [socket.AF_INET6 if ":" in address else socket.AF_INET for address in addresses]
        return [
            (family, socket.SOCK_STREAM, 6, "", (address, port))
            for family, address in zip(families, addresses, strict=True)
        ]


class Work:
    """Notes what runs; never ends by itself."""

    def __init__(self) -> None:
        self.running: set[str] = set()
        self.changed = asyncio.Event()

    async def __call__(self, address: str) -> None:
        self.running.add(address)
        self.changed.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.running.discard(address)
            self.changed.set()

    async def until(self, *addresses: str) -> None:
        async with asyncio.timeout(10):
            while self.running != set(addresses):
                self.changed.clear()
                await self.changed.wait()


async def test_routers_come_and_go_with_their_name(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(monkeypatch, registry=["10.0.0.1"], other=["10.0.1.1"])
    work = Work()
    running = asyncio.create_task(with_each_router(("registry:50052", "other:7"), work))
    await work.until("10.0.0.1:50052", "10.0.1.1:7")
    names.hosts["registry"] = ["10.0.0.1", "10.0.0.2"]
    await work.until("10.0.0.1:50052", "10.0.0.2:50052", "10.0.1.1:7")
    names.hosts["registry"] = ["10.0.0.2"]
    await work.until("10.0.0.2:50052", "10.0.1.1:7")
    names.hosts["registry"] = []  # nobody says: what was known stays
    names.hosts["other"] = ["10.0.1.2"]
    await work.until("10.0.0.2:50052", "10.0.1.2:7")
    running.cancel()
    await work.until()


async def test_an_error_of_the_work_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    Names(monkeypatch, registry=["10.0.0.1"])

    async def broken(_address: str) -> None:
        raise ZeroDivisionError

    async with asyncio.timeout(10):
        with pytest.RaisesGroup(ZeroDivisionError):
            await with_each_router(("registry:1",), broken)


async def test_a_router_of_two_families_is_one_router(monkeypatch: pytest.MonkeyPatch) -> None:
    Names(monkeypatch, both=["::1", "127.0.0.1"], six=["::1"], twice=["10.0.0.1", "10.0.0.1"])
    assert await look_up("both:1") == {"127.0.0.1:1"}
    assert await look_up("six:1") == {"[::1]:1"}
    assert await look_up("twice:1") == {"10.0.0.1:1"}


async def test_an_address_is_its_own_name() -> None:
    assert await look_up("127.0.0.1:50052") == {"127.0.0.1:50052"}
    assert await look_up("[::1]:50052") == {"[::1]:50052"}
