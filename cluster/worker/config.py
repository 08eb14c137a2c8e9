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

DTYPES: Final = {"float32": 4, "bfloat16": 2}  # bytes of a number
OWN_ADDRESS: Final = "auto"
MAX_CACHE_BYTES: Final = 1 << 46


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What a cluster's workers are all told alike. WorkerConfig checks it: so does a cluster, by making one of each."""

    model_folder: Path
    """Folder in Hugging Face form: config.json, tokenizer.json, *.safetensors."""
    dtype: str = "float32"
    """Of KV and of what is multiplied: weights kept as 4-bit or 8-bit blocks stay blocks. float32 is exact, token for
    token; bfloat16 halves the KV, and weights that are floats."""
    num_blocks: int = 1024
    """KV blocks of each worker's pool. The pool is zeroed, so resident: 1024 blocks of the default model
    are 720 MiB in float32."""
    block_size: int = 16
    """Tokens in a block."""
    host_cache_bytes: int = 0
    """Host memory in which each worker keeps cached blocks that its KV pool has no room for; 0: none."""
    disk_cache_bytes: int = 0
    """Room of each worker on a disk for those that this has no room for; needs `host_cache_bytes`, at most half of
    which is read back from it at a time. 0: none."""
    disk_cache_folder: Path | None = None
    """Folder, the same on each host, where each worker makes a file for them; it has no name and ends with it."""
    tensor_parallel_size: int = 1
    """GPUs of each worker, on one host, which share its model. It must divide the model's KV heads, hidden size,
    intermediate size and vocabulary."""
    token_budget: int = 256
    """Most tokens that one engine step may compute."""
    prefill_delay_steps: int = 0
    """Most engine steps that a prompt waits for others to be computed with, beside decodes."""
    max_decode_slowdown: float = 1000.0
    """How many times longer than its decodes alone an engine step may take for the prompts that share it; 1000: any."""
    unpack_weights: bool = False
    """Hold quantised weights as floats of `dtype`: three times the memory, faster for batches of 4 and more with
    AVX-512. In bfloat16, other tokens on a processor without instructions for it."""
    adapters: Mapping[str, Path] = field(default_factory=dict)
    """LoRA adapters of the model, by the names that clients ask for: folders in PEFT's form, the same on each host."""
    redis_url: str | None = None
    """Redis or Valkey of the shared prefix index and limits. None: none, but that `tandem up` starts a Valkey on
    loopback."""
    kv_interface: str = "lo"
    """Network interfaces that the KV transfer listens on and uses, by name: "lo" is this machine alone; "eth0,eth1"
    both. Of a cluster, "mlx5_0:1;mlx5_1:1" is one for each worker, in turn."""
    kv_checksums: bool = True
    """Check that every pushed KV block arrived whole (in host memory): about 0.2 % of a prompt's time."""
    kv_load_failure_policy: str = "recompute"
    """When one did not: "recompute" what comes from the first bad block on, or "fail" the hand-off."""
    kv_bytes_in_flight: int = 64 << 20
    """Most KV bytes on their way from one worker to another; the rest waits, hand-offs in turn."""
    kv_faults: str | None = None
    """Faults to inject into the KV transfer, for tests only: "lose_notice=0.1,fail_push=0.05,seed=7"."""
    worker_host: str = "127.0.0.1"
    """Address that a worker listens on and is called at; "auto": its host's own address on `kv_interface`."""
    metrics_port: int = 0
    """Port of a worker's /metrics, where each worker has a host of its own; 0: any free port."""
    lease_s: float = 10.0
    """How long a hand-off's blocks stay reserved without a word from the other side."""
    drain_timeout_s: float = 5.0
    """How long running requests may go on after a stop was asked for."""
    drain_finish_s: float = 2.0
    """How long they may go on on a worker that drains before they are moved to another one, where there is one."""
    trace_endpoint: str = ""
    """Where routers and workers send traces, by OTLP over HTTP: http://collector:4318/v1/traces; empty: nowhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(WorkerSettings):
    """One life of one worker, as its process is told."""

    worker_id: str
    """Stable name of the place: "decode-0"."""
    incarnation: str
    """Random, new at each start: messages that name another one are refused."""
    role: Role
    """What it does."""
    router_addresses: tuple[str, ...]
    """host:port of each router's registry, or names that resolve to them, for Announce."""
    cpu_core: int | None = None
    """Core on which steps are computed; None: any."""
    numa_node: int | None = None
    """NUMA node to run on; None: any."""
    nvlink_domain: str = ""
    """Name of the NVLink domain that its host belongs to; empty: none, or not known."""
    gpu_index: int = 0
    """First GPU to compute on, `tensor_parallel_size` in a row, where an engine for GPUs is chosen; counted round where
    there are fewer."""
    price_per_hour: float = 0.0
    """What an hour of its place costs; 0: not known."""
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


def slots_within(name: str, num_bytes: int, block_bytes: int) -> int:
    """Blocks for which a cache tier of `num_bytes` has room. Raises: BadRequest: on `name`: for none, though it is not
    0."""
    if 0 < num_bytes < block_bytes:
        raise BadRequest(name, f"must be 0 or hold at least one block of {block_bytes} bytes, got {num_bytes}")
    return num_bytes // block_bytes
