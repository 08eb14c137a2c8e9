"""Words for who asked at a port where something else listens: what is wrong, and which port is likely meant."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

from cluster.config import MAX_ROUTERS, ROUTER_PORT_STEP, ClusterConfig

if TYPE_CHECKING:  # commands that need no gRPC start sooner without it
    import grpc

LISTENERS: Final = {
    "http_port": "the HTTP front",
    "grpc_port": "the gRPC front",
    "registry_port": "the registry",
    "controller_port": "the controller",
}
_DEFAULTS: Final[dict[str, Any]] = {item.name: item.default for item in fields(ClusterConfig) if item.name in LISTENERS}


def meant(port: int | None, wanted: str) -> str:
    """Whose port this is by default, and where `wanted`, a key of LISTENERS, then is."""
    for name, first_port in _DEFAULTS.items():
        num_ports = 1 if name == "controller_port" else MAX_ROUTERS
        if name != wanted and port in range(first_port, first_port + ROUTER_PORT_STEP * num_ports, ROUTER_PORT_STEP):
            there = _DEFAULTS[wanted] + (0 if wanted == "controller_port" else port - first_port)
            return f"{port} is {LISTENERS[name]} by default, {there} {LISTENERS[wanted]}"
    return f"{LISTENERS[wanted]} is wanted, {_DEFAULTS[wanted]} by default"


def grpc_failure(error: grpc.aio.AioRpcError, address: str, wanted: str) -> str:
    """What to tell of a call that failed."""
    code, details = error.code().name, error.details() or ""
    port = address.rpartition(":")[2]
    hint = meant(int(port) if port.isdecimal() else None, wanted)
    if code == "UNIMPLEMENTED":
        return f"speaks gRPC, but is not {LISTENERS[wanted]}: {hint}"
    if "HTTP/2" in details:  # of what came instead
        return f"does not speak gRPC: {hint}"
    return f"{code}: {details}"
