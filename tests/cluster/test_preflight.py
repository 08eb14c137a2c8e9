"""Which ports must be free before which command starts."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.config import ClusterConfig
from cluster.preflight import resolve_ports, resolve_router_ports
from core.errors import BadRequest

NAMES = ("http_port", "grpc_port", "registry_port", "controller_port")


@pytest.mark.parametrize(
    ("resolve", "taken", "refused"),
    [(resolve_ports, name, True) for name in NAMES]
    + [(resolve_router_ports, name, name != "controller_port") for name in NAMES],
)
def test_a_command_asks_for_the_ports_that_it_listens_on(
    resolve: Callable[[ClusterConfig], ClusterConfig], taken: str, refused: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ports = dict.fromkeys(NAMES, 0) | {taken: listener.getsockname()[1]}
        config = ClusterConfig(Path("model"), **ports)
        if refused:
            with pytest.raises(BadRequest) as error:
                resolve(config)
            assert error.value.field == f"--{taken.replace('_', '-')}"
        else:
            assert getattr(resolve(config), taken) == ports[taken]


def test_no_connection_can_take_a_port_that_was_chosen_before_its_server_listens() -> None:
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    resolved = resolve_ports(ClusterConfig(Path("model"), **dict.fromkeys(NAMES, 0)))
    ports = {getattr(resolved, name) for name in NAMES}
    assert len(ports) == len(NAMES) and max(ports) < first_ephemeral
