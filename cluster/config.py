"""What a cluster and each of its workers are told at start: one frozen dataclass each, checked once, at the edge."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import yaml

from core.errors import BadRequest
from core.membership import Role
from kv_transfer.effects import LoadFailurePolicy
from kv_transfer.faults import TransportFaults

DTYPES: Final = ("float32", "bfloat16")
MAX_WORKERS_PER_ROLE: Final = 64


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """One cluster on this machine: a router, prefill workers and decode workers."""

    model_folder: Path
    """Folder in Hugging Face form: config.json, tokenizer.json, *.safetensors."""
    model_name: str = ""
    """Name that clients ask for; empty: the folder's name."""
    num_prefill: int = 1
    """Prefill workers; not used when `aggregated`."""
    num_decode: int = 1
    """Decode workers."""
    aggregated: bool = False
    """No prefill workers: each decode worker prefills its own requests."""
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
    dtype: str = "float32"
    """Of weights and KV. float32 is exact, token for token; bfloat16 halves the memory."""
    num_blocks: int = 1024
    """KV blocks of each worker's pool. The pool is zeroed, so resident: 1024 blocks of the default model
    are 720 MiB in float32."""
    block_size: int = 16
    """Tokens in a block."""
    token_budget: int = 256
    """Most tokens that one engine step may compute."""
    prefill_delay_steps: int = 0
    """Most engine steps that a prompt waits for others to be computed with, beside decodes."""
    redis_url: str | None = None
    """Redis or Valkey of the shared prefix index; None: an embedded Valkey on loopback."""
    kv_interface: str = "lo"
    """Network interfaces that the KV transfer listens on and uses, by name: "lo" is this machine alone."""
    kv_checksums: bool = True
    """Check that every pushed KV block arrived whole (in host memory): about 0.2 % of a prompt's time."""
    kv_load_failure_policy: str = "recompute"
    """When one did not: "recompute" what comes from the first bad block on, or "fail" the hand-off."""
    kv_bytes_in_flight: int = 64 << 20
    """Most KV bytes on their way from one worker to another; the rest waits, hand-offs in turn."""
    kv_faults: str | None = None
    """Faults to inject into the KV transfer, for tests only: "lose_notice=0.1,fail_push=0.05,seed=7"."""
    pin_workers: bool = False
    """Give each worker a core of its own, as far as there are cores."""
    lease_s: float = 10.0
    """How long a hand-off's blocks stay reserved without a word from the other side."""
    start_timeout_s: float = 120.0
    """A worker or router that is not up by then has failed."""
    local_prefill_cost: float = 2.0
    """A prompt is computed on its decode worker when that gives its first token so many times sooner than the prefill
    workers would. 1: wherever it is sooner; .inf: always on a prefill worker."""
    drain_timeout_s: float = 5.0
    """How long running requests may go on after a stop was asked for."""
    heartbeat_timeout_s: float = 20.0
    """A worker process that does not answer for so long is hung: killed and replaced."""

    def __post_init__(self) -> None:
        _require_range("num_prefill", self.num_prefill, 0 if self.aggregated else 1, MAX_WORKERS_PER_ROLE)
        _require_range("num_decode", self.num_decode, 1, MAX_WORKERS_PER_ROLE)
        taken: dict[int, str] = {}
        for name in ("http_port", "grpc_port", "registry_port"):
            port = getattr(self, name)
            _require_range(name, port, 0, 65535)
            if port and port in taken:
                raise BadRequest(name, f"must differ from {taken[port]}, both are {port}")
            taken[port] = name
        for name in ("http_host", "grpc_host", "registry_host"):
            if not getattr(self, name):
                raise BadRequest(name, "must not be empty")
        if not self.local_prefill_cost >= 1.0:
            raise BadRequest("local_prefill_cost", f"must be a number of at least 1, got {self.local_prefill_cost}")
        for name in ("lease_s", "start_timeout_s", "drain_timeout_s", "heartbeat_timeout_s"):
            _require_range(name, getattr(self, name), 0.1, 3600.0)
        _require_engine_fields(self)

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
    def registry_address(self) -> str:
        """host:port of the router, for workers and their keeper."""
        return f"{self.registry_host}:{self.registry_port}"

    @property
    def roles(self) -> tuple[tuple[str, Role], ...]:
        """(worker id, role) of every wanted worker, prefill first."""
        num_prefill = 0 if self.aggregated else self.num_prefill
        return (
            *((f"prefill-{index}", Role.PREFILL) for index in range(num_prefill)),
            *((f"decode-{index}", Role.DECODE) for index in range(self.num_decode)),
        )


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
    router_address: str
    """host:port of the router's gRPC server, for Announce."""
    dtype: str = "float32"
    """Of weights and KV."""
    num_blocks: int = 1024
    """KV blocks of the pool."""
    block_size: int = 16
    """Tokens in a block."""
    token_budget: int = 256
    """Most tokens of one engine step."""
    prefill_delay_steps: int = 0
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
    cpu_core: int | None = None
    """Core to run on; None: any."""
    gpu_index: int = 0
    """GPU to compute on, where an engine for GPUs is chosen; counted round where there are fewer."""
    lease_s: float = 10.0
    """Life of a hand-off lease without renewal."""
    host: str = "127.0.0.1"
    """Where its gRPC server and its metrics listen, on free ports."""

    def __post_init__(self) -> None:
        for name in ("worker_id", "incarnation", "router_address", "host"):
            if not getattr(self, name):
                raise BadRequest(name, "must not be empty")
        if self.cpu_core is not None:
            _require_range("cpu_core", self.cpu_core, 0, 4095)
        _require_range("gpu_index", self.gpu_index, 0, 4095)
        _require_range("lease_s", self.lease_s, 0.1, 3600.0)
        _require_engine_fields(self)


def load_cluster_config(file: Path | None, overrides: Mapping[str, Any], default_model: Path) -> ClusterConfig:
    """Defaults, then the YAML `file`, then `overrides` (flags); each key is a field of ClusterConfig.

    Raises: BadRequest: an unknown key, a wrong type or a value out of range, by its name.
    """
    values = {"model_folder": default_model, **(_read_yaml(file) if file else {}), **overrides}
    if values.get("aggregated") and values.get("num_prefill"):
        raise BadRequest("num_prefill", "an aggregated cluster has no prefill workers: leave it out")
    if isinstance(values["model_folder"], str):
        values["model_folder"] = Path(values["model_folder"])
    hints = typing.get_type_hints(ClusterConfig)
    for name, value in values.items():
        if name not in hints:
            raise BadRequest(name, f"is not a setting; the settings are {', '.join(hints)}")
        values[name] = _typed(name, value, hints[name])
    config = ClusterConfig(**values)
    return replace(config, model_folder=config.model_folder.expanduser().absolute())


def worker_config(cluster: ClusterConfig, worker_id: str, incarnation: str, role: Role, **rest: Any) -> WorkerConfig:
    """A worker's share of the cluster's settings; `rest` holds what only the launcher knows."""
    shared = {item.name for item in fields(WorkerConfig)} & {item.name for item in fields(ClusterConfig)}
    values = {name: getattr(cluster, name) for name in shared} | rest
    return WorkerConfig(worker_id=worker_id, incarnation=incarnation, role=role, **values)


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(file.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise BadRequest("config", f"cannot be read: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise BadRequest("config", f"{file} must hold a mapping of settings")
    return {str(name): value for name, value in values.items()}


def _typed(name: str, value: object, hint: object) -> object:
    """`value` if it is of the field's type; whole numbers also do for float fields."""
    allowed: tuple[Any, ...] = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if float in allowed and type(value) is int:
        return float(value)
    # bool is a subclass of int: `http_port: true` must not pass.
    misplaced_bool = isinstance(value, bool) and bool not in allowed
    if misplaced_bool or not isinstance(value, allowed):
        names = " or ".join("nothing" if kind is type(None) else kind.__name__ for kind in allowed)
        raise BadRequest(name, f"must be {names}, got {value!r}")
    return value


def _require_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise BadRequest(name, f"must be in [{low}, {high}], got {value}")


def _require_engine_fields(config: ClusterConfig | WorkerConfig) -> None:
    if config.dtype not in DTYPES:
        raise BadRequest("dtype", f"must be one of {', '.join(DTYPES)}, got {config.dtype!r}")
    if not config.kv_interface:
        raise BadRequest("kv_interface", "must not be empty")
    policies = [policy.value for policy in LoadFailurePolicy]
    if config.kv_load_failure_policy not in policies:
        raise BadRequest("kv_load_failure_policy", f"must be {' or '.join(policies)}")
    _require_range("kv_bytes_in_flight", config.kv_bytes_in_flight, 1 << 16, 1 << 36)
    if config.kv_faults is not None:
        TransportFaults.parse(config.kv_faults)
    _require_range("num_blocks", config.num_blocks, 1, 1 << 22)
    _require_range("block_size", config.block_size, 1, 256)
    _require_range("token_budget", config.token_budget, 1, 65536)
    _require_range("prefill_delay_steps", config.prefill_delay_steps, 0, 1000)
    if config.redis_url is not None and not config.redis_url.startswith(("redis://", "rediss://", "unix://")):
        raise BadRequest("redis_url", f"must start with redis://, rediss:// or unix://, got {config.redis_url!r}")
