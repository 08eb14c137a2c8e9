"""What a router is told at start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from core.errors import BadRequest


@dataclass(frozen=True, slots=True)
class DispatcherConfig:
    """max_open_requests: most requests in any stage. queue_timeout_s: longest wait for ready workers, of a request that
    had its turn. tokens_ahead: prompt tokens that may be out for each worker, see router/admission/room.py.
    max_silent_failures: so many failed attempts without a token end a request; max_failures: more than so many do, with
    tokens or not. Failures while it was computed, less deaths of workers without it: one that kills workers must not
    kill all. request_timeout_s: its longest life.
    local_prefill_cost: a prompt is computed on its decode worker when that gives its first token so many times sooner
    than the prefill workers would; inf: never while there are any."""

    max_open_requests: int = 4096
    queue_timeout_s: float = 30.0
    max_silent_failures: int = 5
    max_failures: int = 16
    request_timeout_s: float = 1800.0
    local_prefill_cost: float = 2.0
    tokens_ahead: int = 1024

    def __post_init__(self) -> None:
        if not self.local_prefill_cost >= 1.0:
            raise BadRequest("local_prefill_cost", f"must be a number of at least 1, got {self.local_prefill_cost}")


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """model_folder: tokenizer, chat template and limits are read there; the weights are not.
    silence_timeout_s: a worker that says nothing for so long is given up. drain_timeout_s: how long open requests
    may go on after a stop. max_context_tokens: what one worker's KV pool holds, when the model's context is longer.
    max_workers: most that register. Ports: 0 takes any free one. policy_file: see router/policy_file.py; None: none.
    redis_url: where routers share the tenants' limits; None: each has its own. trace_endpoint, trace_ratio: see
    telemetry/tracing.py; empty: no traces. adapters: folders of LoRA adapters, by the names that clients ask for.
    slo_ttft_s, slo_itl_s: see telemetry/slo_metrics.py.

    The registry has a port of its own because whoever reaches it is believed: a death reported there frees blocks."""

    model_folder: Path
    model_name: str
    http_host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_host: str = "127.0.0.1"
    grpc_port: int = 50051
    registry_host: str = "127.0.0.1"
    registry_port: int = 50052
    silence_timeout_s: float = 10.0
    drain_timeout_s: float = 5.0
    max_workers: int = 1024
    max_context_tokens: int | None = None
    policy_file: Path | None = None
    redis_url: str | None = None
    trace_endpoint: str = ""
    trace_ratio: float = 1.0
    slo_ttft_s: float = 2.5
    slo_itl_s: float = 0.1
    adapters: Mapping[str, Path] = field(default_factory=dict)
    dispatcher: DispatcherConfig = field(default_factory=DispatcherConfig)

    def __post_init__(self) -> None:
        if not self.model_name:
            raise BadRequest("model_name", "must not be empty")
        for name in ("http_port", "grpc_port", "registry_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise BadRequest(name, f"must be in [0, 65535], got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class RouterEndpoints:
    """Where a started router listens, host:port."""

    http_address: str
    grpc_address: str
    registry_address: str
