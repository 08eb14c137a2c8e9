"""The public series, by name: dashboards and alerts outside this repository read them."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client import CollectorRegistry, generate_latest

from core.blocks import CacheTier
from core.membership import WorkerLoad
from router.admission.policy import Band
from telemetry.router_metrics import PolicyMetrics, RouterMetrics, RouterState, RouterStateCollector, RoutingMetrics
from telemetry.slo_metrics import SloTargets
from telemetry.trace_metrics import TraceMetrics
from telemetry.worker_metrics import PushOutcome, WorkerMetrics, WorkerState

ROUTER_FAMILIES = {
    "tandem_adapter_requests",
    "tandem_kv_bytes_moved",
    "tandem_open_requests",
    "tandem_output_tokens",
    "tandem_policy_reads",
    "tandem_prompt_tokens",
    "tandem_rejected",
    "tandem_requests",
    "tandem_router_avoided_places",
    "tandem_router_cache_gaps",
    "tandem_router_hedges",
    "tandem_router_hit_tokens",
    "tandem_router_known_blocks",
    "tandem_router_plans",
    "tandem_router_queue_seconds",
    "tandem_router_queued_requests",
    "tandem_router_replans",
    "tandem_router_waiting_requests",
    "tandem_router_workers",
    "tandem_router_workers_lost",
    "tandem_slo_gaps",
    "tandem_slo_requests",
    "tandem_slo_target_seconds",
    "tandem_tpot_seconds",
    "tandem_ttft_seconds",
    "vllm:cache_config_info",
    "vllm:e2e_request_latency_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:generation_tokens",
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:prefix_cache_hits",
    "vllm:prefix_cache_queries",
    "vllm:prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:request_prompt_tokens",
    "vllm:request_success",
    "vllm:request_time_per_output_token_seconds",
    "vllm:time_to_first_token_seconds",
}
TRACE_FAMILIES = {"tandem_trace_spans_lost"}  # of both, where they trace
WORKER_FAMILIES = {
    "tandem_cache_blocks",
    "tandem_cache_bytes",
    "tandem_cache_damaged_blocks",
    "tandem_cache_hit_blocks",
    "tandem_kv_handoffs_open",
    "tandem_kv_transfer_bytes",
    "tandem_kv_transfer_damaged_pushes",
    "tandem_kv_transfer_in_flight",
    "tandem_kv_transfer_peers_lost",
    "tandem_kv_transfer_push_bytes",
    "tandem_kv_transfer_pushes",
    "tandem_kv_transfer_seconds",
    "tandem_kv_transfer_stage_seconds",
    "tandem_kv_transfer_zombies",
    "tandem_prefix_hit_blocks",
    "tandem_prefix_index_errors",
    "tandem_prefix_lookups",
    "tandem_worker_blocks",
    "tandem_worker_energy_joules",
    "tandem_worker_open_requests",
    "tandem_worker_orphaned_blocks",
    "tandem_worker_preemptions",
    "tandem_worker_price_per_hour",
    "tandem_worker_running_requests",
    "tandem_worker_step_seconds",
    "tandem_worker_tokens",
    "tandem_worker_waiting_requests",
}


STATE = WorkerState(
    load=WorkerLoad(waiting_requests=4, running_requests=3, free_blocks=5, used_blocks=2, quarantined_blocks=1),
    open_requests=7,
    orphaned_blocks=0,
    open_handoffs=0,
    preemptions=6,
    pushes_in_flight=2,
    zombie_pushes=1,
    peers_lost=4,
    index_lookups=7,
    index_hit_blocks=8,
    index_failures=9,
    cache_hit_blocks={CacheTier.DEVICE: 11, CacheTier.HOST: 12, CacheTier.DISK: 0},
    cache_blocks={CacheTier.DEVICE: 2, CacheTier.HOST: 3},
    cache_damaged_blocks=1,
    block_bytes=1024,
    price_per_hour=2.5,
    energy_joules=12.0,
)


# Each has a closed list of values, but `adapter`, of which there are as many as are configured.
BOUNDED_LABELS = {
    *("adapter", "attained", "band", "endpoint", "finished_reason", "kind", "life", "model_name", "objective"),
    *("outcome", "part", "reason", "role", "stage", "state", "tier"),
}


def router_registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    RouterMetrics(registry, "tiny", SloTargets(ttft_s=2.5, itl_s=0.1), tuple(Band))
    RoutingMetrics(registry)
    PolicyMetrics(registry)
    state = RouterState(0, {"interactive": 0}, {("decode", "ready"): 1}, 0, 0, 0)
    registry.register(RouterStateCollector(lambda: state, "tiny"))
    return registry


def test_labels_are_of_closed_lists() -> None:
    """No request, session, tenant or worker is one: there would be as many series."""
    registry = router_registry()
    WorkerMetrics(registry, lambda: STATE)
    TraceMetrics(registry)
    labels = {name for collector in registry._collector_to_names for name in getattr(collector, "_labelnames", ())}
    labels |= {name for family in registry.collect() for sample in family.samples for name in sample.labels}
    config = {"le", "block_size", "num_gpu_blocks"}  # of buckets, and of the one series that tells the cache's size
    assert labels - config == BOUNDED_LABELS


def test_router_series_are_public() -> None:
    registry = router_registry()
    assert {family.name for family in registry.collect()} == ROUTER_FAMILIES


def test_worker_series_are_public() -> None:
    registry = CollectorRegistry()
    WorkerMetrics(registry, lambda: STATE)
    assert {family.name for family in registry.collect()} == WORKER_FAMILIES


def test_trace_series_are_public() -> None:
    registry = CollectorRegistry()
    TraceMetrics(registry)
    assert {family.name for family in registry.collect()} == TRACE_FAMILIES


def test_worker_numbers() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry, lambda: STATE)
    metrics.step_done(0.01, prefill_tokens=16, decode_tokens=3)
    metrics.push_done(PushOutcome.DONE, num_bytes=4096, wait_s=0.5, duration_s=2.0, exposed_s=1.0)
    metrics.push_done(PushOutcome.FAILED, num_bytes=4096, wait_s=0.0, duration_s=0.25, exposed_s=0.0)
    metrics.landed(0.01)
    metrics.verified(0.001, whole=True)
    metrics.verified(0.001, whole=False)
    lines = generate_latest(registry).decode().splitlines()
    for line in (
        'tandem_worker_blocks{state="quarantined"} 1.0',
        "tandem_worker_step_seconds_count 1.0",
        "tandem_worker_preemptions_total 6.0",
        "tandem_prefix_hit_blocks_total 8.0",
        'tandem_worker_tokens_total{kind="prefill"} 16.0',
        'tandem_kv_transfer_pushes_total{outcome="failed"} 1.0',
        "tandem_kv_transfer_bytes_total 4096.0",
        'tandem_kv_transfer_seconds_total{part="hidden"} 1.75',
        'tandem_kv_transfer_seconds_total{part="exposed"} 1.0',
        'tandem_kv_transfer_stage_seconds_count{stage="verify"} 2.0',
        "tandem_kv_transfer_damaged_pushes_total 1.0",
        "tandem_kv_transfer_zombies 1.0",
        'tandem_cache_hit_blocks_total{tier="host"} 12.0',
        'tandem_cache_blocks{tier="device"} 2.0',
        'tandem_cache_bytes{tier="host"} 3072.0',
        "tandem_cache_damaged_blocks_total 1.0",
        "tandem_worker_price_per_hour 2.5",
        "tandem_worker_energy_joules_total 12.0",
    ):
        assert line in lines, line


def test_what_is_not_known_has_no_series() -> None:
    """A CPU's energy is not 0, and a worker without a price is not free."""
    registry = CollectorRegistry()
    WorkerMetrics(registry, lambda: replace(STATE, price_per_hour=None, energy_joules=None))
    names = {family.name for family in registry.collect()}
    assert WORKER_FAMILIES - names == {"tandem_worker_energy_joules", "tandem_worker_price_per_hour"}
