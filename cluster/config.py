"""What a cluster is told at start, checked once, at the edge; and what of it is for its routers and its workers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from cluster.worker.config import WorkerConfig, WorkerSettings, require_range
from core.errors import BadRequest
from core.membership import Role
from router.config import DispatcherConfig, RouterConfig

MAX_WORKERS_PER_ROLE: Final = 64
MAX_ROUTERS: Final = 16
ROUTER_PORT_STEP: Final = 10  # the default ports of one router lie side by side
PORTS: Final = ("http_port", "grpc_port", "registry_port")
MAX_ADAPTERS: Final = 256
ADAPTER_NAME: Final = re.compile(r"[A-Za-z0-9._:/+@~-]{1,128}")
STEPS_AHEAD: Final = 4  # of prompts, for each worker; the rest waits in the router


@dataclass(frozen=True, slots=True)
class ClusterConfig(WorkerSettings):
    """One cluster: routers, prefill workers and decode workers; on this machine unless `ray_address` says where."""

    model_name: str = ""
    """Name that clients ask for; empty: the folder's name."""
    num_prefill: int = 1
    """Prefill workers; not used when `aggregated`."""
    num_decode: int = 1
    """Decode workers."""
    aggregated: bool = False
    """No prefill workers: each decode worker prefills its own requests."""
    num_routers: int = 1
    """Routers that `tandem up` starts: router i listens on each port below plus 10 i."""
    http_host: str = "127.0.0.1"
    """Where the OpenAI-compatible HTTP front listens."""
    http_port: int = 8000
    """0: any free port."""
    grpc_host: str = "127.0.0.1"
    """Where the gRPC front listens."""
    grpc_port: int = 50051
    """0: any free port."""
    registry_host: str = "127.0.0.1"
    """Where workers announce themselves and `tandem status` asks; whoever reaches it is believed."""
    registry_port: int = 50052
    """0: any free port."""
    router_host: str = ""
    """Name at which workers and their controller reach the registries, one router behind each address that it resolves
    to; empty: `registry_host`."""
    ray_address: str = ""
    """host:port of a Ray that runs on several hosts, for `tandem controller`; `tandem up` starts one of its own."""
    controller_host: str = "127.0.0.1"
    """Where the workers' controller listens, for `tandem role` and `tandem drain`; whoever reaches it is obeyed."""
    controller_port: int = 50053
    """0: any free port."""
    keep_workers: bool = False
    """`tandem controller` leaves its workers running when it is stopped: the next one takes them over."""
    controller_health_host: str = "127.0.0.1"
    """Where `tandem controller` answers /livez and /readyz."""
    controller_health_port: int = 8081
    """Its port."""
    numa_nodes: str = ""
    """NUMA nodes whose cores, and so whose memory, workers take in turn: "0", "0,1"; empty: any."""
    pin_workers: bool = True
    """`tandem up` gives the thread that computes a worker's steps a core of its own, of those that it may use itself,
    where there are enough, and no `numa_nodes`."""
    start_timeout_s: float = 120.0
    """A worker or router that is not up by then has failed."""
    local_prefill_cost: float = 2.0
    """A prompt is computed on its decode worker when that gives its first token so many times sooner than the prefill
    workers would. 1: wherever it is sooner; .inf: always on a prefill worker."""
    policy_file: Path | None = None
    """What the router may be told while it runs: tenants, their keys and limits, the queue's bounds; read again when it
    changes (docs/operations/admission.md). None: nothing."""
    trace_ratio: float = 1.0
    """The part of the requests that is traced, of those whose caller sends no W3C `traceparent`, which decides."""
    slo_ttft_s: float = 2.5
    """What is promised of a first token: metrics and alerts count what was kept."""
    slo_itl_s: float = 0.1
    """What is promised of a gap between tokens."""
    prefill_price_per_hour: float = 0.0
    """What an hour of a prefill worker's place costs, in any currency, for the cost of a token; 0: not known."""
    decode_price_per_hour: float = 0.0
    """The same for a decode worker's place."""
    stand_in: bool = True
    """While no decode worker is ready and a dead one is being replaced, a prefill worker decodes. Not where prefill
    workers' machines are not fit for that."""
    heartbeat_timeout_s: float = 20.0
    """A worker process that does not answer for so long is hung: killed and replaced."""

    def __post_init__(self) -> None:
        require_range("num_prefill", self.num_prefill, 0 if self.aggregated else 1, MAX_WORKERS_PER_ROLE)
        require_range("num_decode", self.num_decode, 1, MAX_WORKERS_PER_ROLE)
        require_range("num_routers", self.num_routers, 1, MAX_ROUTERS)
        taken: dict[int, str] = {}
        for name in (*PORTS, "controller_port"):
            first_port = getattr(self, name)
            require_range(name, first_port, 0, 65535 - ROUTER_PORT_STEP * (self.num_routers - 1))
            ports = self.router_ports(name) if name in PORTS else range(first_port, first_port + 1)
            for port in ports if first_port else ():
                if port in taken:
                    raise BadRequest(name, f"must differ from {taken[port]}, both are {port}")
                taken[port] = name
        for name in ("http_host", "grpc_host", "registry_host", "controller_host", "controller_health_host"):
            if not getattr(self, name):
                raise BadRequest(name, "must not be empty")
        if self.ray_address and not _is_address(self.ray_address):
            raise BadRequest("ray_address", f"must be host:port, got {self.ray_address!r}")
        require_range("controller_health_port", self.controller_health_port, 1, 65535)
        for name in ("lease_s", "start_timeout_s", "drain_timeout_s", "heartbeat_timeout_s"):
            require_range(name, getattr(self, name), 0.1, 3600.0)
        require_range("drain_finish_s", self.drain_finish_s, 0.0, 3600.0)
        if self.trace_endpoint and not self.trace_endpoint.startswith(("http://", "https://")):
            raise BadRequest("trace_endpoint", f"must be an http:// or https:// URL, got {self.trace_endpoint!r}")
        for name in ("slo_ttft_s", "slo_itl_s"):
            require_range(name, getattr(self, name), 0.001, 3600.0)
        require_range("prefill_price_per_hour", self.prefill_price_per_hour, 0.0, 1e6)
        require_range("decode_price_per_hour", self.decode_price_per_hour, 0.0, 1e6)
        require_range("trace_ratio", self.trace_ratio, 0.0, 1.0)
        if not all(node.isdecimal() for node in self.numa_nodes.split(",") if self.numa_nodes):
            raise BadRequest("numa_nodes", f"must be numbers with commas between them, got {self.numa_nodes!r}")
        require_range("adapters", len(self.adapters), 0, MAX_ADAPTERS)
        for name in self.adapters:
            if not ADAPTER_NAME.fullmatch(name) or name == self.served_model_name:
                message = "a name is 1 to 128 letters, digits or . _ : / + @ ~ - and not the model's"
                raise BadRequest("adapters", f"{message}, got {name!r}")
        # What a router or a worker would refuse is refused here already.
        DispatcherConfig(local_prefill_cost=self.local_prefill_cost)
        for worker_id, role in self.roles.items():
            worker_config(self, worker_id, "any", role, router_addresses=self.registry_addresses)

    @property
    def served_model_name(self) -> str:
        return self.model_name or self.model_folder.name

    @property
    def http_url(self) -> str:
        return f"http://{self.http_host}:{self.http_port}"

    @property
    def grpc_address(self) -> str:
        """host:port of the router, for clients."""
        return f"{self.grpc_host}:{self.grpc_port}"

    @property
    def registry_addresses(self) -> tuple[str, ...]:
        """host:port of each router, or one that resolves to all, for workers and their keeper."""
        host = self.router_host or self.registry_host
        return tuple(f"{host}:{port}" for port in self.router_ports("registry_port"))

    def router_ports(self, name: str) -> range:
        """One for each router: of `http_port`, `grpc_port` or `registry_port`."""
        first_port = getattr(self, name)
        return range(first_port, first_port + ROUTER_PORT_STEP * self.num_routers, ROUTER_PORT_STEP)

    def of_router(self, index: int) -> ClusterConfig:
        """The same, with the ports of one router alone."""
        http_port, grpc_port, registry_port = (self.router_ports(name)[index] for name in PORTS)
        return replace(self, num_routers=1, http_port=http_port, grpc_port=grpc_port, registry_port=registry_port)

    @property
    def controller_address(self) -> str:
        """host:port of the controller, for `tandem role`."""
        return f"{self.controller_host}:{self.controller_port}"

    @property
    def roles(self) -> dict[str, Role]:
        """Of every wanted worker, by worker id, prefill first."""
        num_prefill = 0 if self.aggregated else self.num_prefill
        prefill = {f"prefill-{index}": Role.PREFILL for index in range(num_prefill)}
        return prefill | {f"decode-{index}": Role.DECODE for index in range(self.num_decode)}

    def ordinal(self, worker_id: str) -> int:
        """Its place among the cluster's workers."""
        return list(self.roles).index(worker_id)

    def core_of(self, worker_id: str, cores: Sequence[int]) -> int | None:
        """A core of its own, of `cores`, the first ones first; None where they are fewer than workers, or another rule
        holds for them."""
        if not self.pin_workers or self.numa_nodes or len(cores) < len(self.roles):
            return None
        return cores[self.ordinal(worker_id)]


def worker_config(cluster: ClusterConfig, worker_id: str, incarnation: str, role: Role, **rest: Any) -> WorkerConfig:
    """A worker's share of the cluster's settings; `rest` holds what only the launcher knows."""
    values = {item.name: getattr(cluster, item.name) for item in fields(WorkerSettings)}
    turn = cluster.ordinal(worker_id)
    values["kv_interface"] = _taken(cluster.kv_interface.split(";"), turn)
    values["numa_node"] = int(_taken(cluster.numa_nodes.split(","), turn)) if cluster.numa_nodes else None
    values |= rest
    place = cluster.roles[worker_id]  # its hardware, whatever it serves as
    price = cluster.prefill_price_per_hour if place is Role.PREFILL else cluster.decode_price_per_hour
    return WorkerConfig(worker_id=worker_id, incarnation=incarnation, role=role, price_per_hour=price, **values)


def _taken(choices: Sequence[str], turn: int) -> str:
    return choices[turn % len(choices)]


def router_config(cluster: ClusterConfig) -> RouterConfig:
    """The router's share."""
    shared = {item.name for item in fields(RouterConfig)} & {item.name for item in fields(ClusterConfig)}
    return RouterConfig(
        **{name: getattr(cluster, name) for name in shared} | {"model_name": cluster.served_model_name},
        max_context_tokens=cluster.num_blocks * cluster.block_size,
        dispatcher=DispatcherConfig(
            local_prefill_cost=cluster.local_prefill_cost, tokens_ahead=STEPS_AHEAD * cluster.token_budget
        ),
    )


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal()
