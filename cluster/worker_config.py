"""What one life of a worker is told at start, checked once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from core.errors import BadRequest
from core.membership import Role
from engine.scheduler_config import SchedulerConfig
from kv_transfer.effects import LoadFailurePolicy
from kv_transfer.faults import TransportFaults
from kv_transfer.redis_url import RedisUrl

DTYPES: Final = ("float32", "bfloat16")
OWN_ADDRESS: Final = "auto"
MAX_CACHE_BYTES: Final = 1 << 46


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One life of one worker, as its host process gets it."""

    worker_id: str
    """Stable name of the place: "decode-0"."""
    incarnation: str
    """Random, new at each start: messages that name another one are refused."""
    role: Role
    """What it does."""
    model_folder: Path
    """As in ClusterConfig."""
    router_addresses: tuple[str, ...]
    """host:port of each router's registry, or names that resolve to them, for Announce."""
    dtype: str = "float32"
    """As in ClusterConfig."""
    num_blocks: int = 1024
    """KV blocks of the pool."""
    block_size: int = 16
    """Tokens in a block."""
    host_cache_bytes: int = 0
    """As in ClusterConfig."""
    disk_cache_bytes: int = 0
    """As in ClusterConfig."""
    disk_cache_folder: Path | None = None
    """As in ClusterConfig."""
    token_budget: int = 256
    """Most tokens of one engine step."""
    prefill_delay_steps: int = 0
    """As in ClusterConfig."""
    max_decode_slowdown: float = 1000.0
    """As in ClusterConfig."""
    unpack_weights: bool = False
    """As in ClusterConfig."""
    adapters: Mapping[str, Path] = field(default_factory=dict)
    """As in ClusterConfig."""
    redis_url: str | None = None
    """Shared prefix index; None: none."""
    kv_interface: str = "lo"
    """As in ClusterConfig."""
    kv_checksums: bool = True
    """As in ClusterConfig."""
    kv_load_failure_policy: str = "recompute"
    """As in ClusterConfig."""
    kv_bytes_in_flight: int = 64 << 20
    """As in ClusterConfig."""
    kv_faults: str | None = None
    """As in ClusterConfig."""
    worker_host: str = "127.0.0.1"
    """As in ClusterConfig: its gRPC server listens there on a free port."""
    metrics_port: int = 0
    """As in ClusterConfig."""
    cpu_core: int | None = None
    """Core to run on; None: any."""
    numa_node: int | None = None
    """NUMA node to run on; None: any."""
    nvlink_domain: str = ""
    """Name of the NVLink domain that its host belongs to; empty: none, or not known."""
    tensor_parallel_size: int = 1
    """As in ClusterConfig."""
    gpu_index: int = 0
    """First GPU to compute on, `tensor_parallel_size` in a row, where an engine for GPUs is chosen; counted round where
    there are fewer."""
    lease_s: float = 10.0
    """Life of a hand-off lease without renewal."""
    drain_timeout_s: float = 5.0
    """As in ClusterConfig, after SIGTERM."""
    drain_finish_s: float = 2.0
    """As in ClusterConfig, after SIGTERM."""
    price_per_hour: float = 0.0
    """What an hour of its place costs; 0: not known."""
    trace_endpoint: str = ""
    """As in ClusterConfig."""
    log_file: Path | None = None
    """Where its output goes; None: where its process's goes."""

    def __post_init__(self) -> None:
        for name in ("worker_id", "incarnation", "router_addresses"):
            if not getattr(self, name):
                raise BadRequest(name, "must not be empty")
        if self.cpu_core is not None:
            require_range("cpu_core", self.cpu_core, 0, 4095)
        if self.numa_node is not None:
            require_range("numa_nodes", self.numa_node, 0, 1023)
        require_range("gpu_index", self.gpu_index, 0, 4095)
        require_range("tensor_parallel_size", self.tensor_parallel_size, 1, 64)
        require_range("lease_s", self.lease_s, 0.1, 3600.0)
        if self.dtype not in DTYPES:
            raise BadRequest("dtype", f"must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        policies = [policy.value for policy in LoadFailurePolicy]
        if self.kv_load_failure_policy not in policies:
            raise BadRequest("kv_load_failure_policy", f"must be {' or '.join(policies)}")
        require_range("kv_bytes_in_flight", self.kv_bytes_in_flight, 1 << 16, 1 << 36)
        if self.kv_faults is not None:
            TransportFaults.parse(self.kv_faults)
        for name in ("kv_interface", "worker_host"):
            if not getattr(self, name):
                raise BadRequest(name, "must not be empty")
        if "" in self.kv_interface.split(","):
            raise BadRequest("kv_interface", f"one of its names is empty: {self.kv_interface!r}")
        require_range("metrics_port", self.metrics_port, 0, 65535)
        require_range("num_blocks", self.num_blocks, 1, 1 << 22)
        require_range("block_size", self.block_size, 1, 256)
        require_range("host_cache_bytes", self.host_cache_bytes, 0, MAX_CACHE_BYTES)
        require_range("disk_cache_bytes", self.disk_cache_bytes, 0, MAX_CACHE_BYTES)
        if (self.disk_cache_folder is None) is not (self.disk_cache_bytes == 0):
            raise BadRequest("disk_cache_folder", "must be given with disk_cache_bytes, and only then")
        if self.disk_cache_bytes and not self.host_cache_bytes:
            raise BadRequest(
                "disk_cache_bytes", "needs host_cache_bytes: blocks go to the disk and come back by the host"
            )
        require_range("token_budget", self.token_budget, 1, 65536)
        _ = self.scheduling
        if self.redis_url is not None:
            RedisUrl.parse(self.redis_url)

    @property
    def scheduling(self) -> SchedulerConfig:
        """Raises: BadRequest."""
        return SchedulerConfig(
            token_budget=self.token_budget,
            prefill_delay_steps=self.prefill_delay_steps,
            max_decode_slowdown=self.max_decode_slowdown,
        )


def require_range(name: str, value: float, low: float, high: float) -> None:
    """Raises: BadRequest: `value` is not from low to high."""
    if not low <= value <= high:
        raise BadRequest(name, f"must be in [{low}, {high}], got {value}")
