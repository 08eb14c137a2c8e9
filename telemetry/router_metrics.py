"""Every public metric name of a router.

Two families stand side by side: our own `tandem_*`, and the `vllm:*` names of the model-server protocol that
gateways, autoscalers and dashboards already read. Labels are bounded: enums, and names of the served model and of its
configured adapters, never an id, a tenant or a text. Each class registers its metrics once, in the registry handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from telemetry.buckets import DURATION_BUCKETS_S, TOKEN_BUCKETS, TPOT_BUCKETS_S, TTFT_BUCKETS_S
from telemetry.slo_metrics import SloMetrics, SloTargets


class Outcome(StrEnum):
    """How a request ended, as the edge saw it."""

    OK = "ok"
    BAD_REQUEST = "bad_request"
    UNAUTHENTICATED = "unauthenticated"
    REJECTED = "rejected"
    CANCELLED = "cancelled"  # the client left
    FAILED = "failed"


class RouterMetrics:
    """What the router's fronts and dispatcher count. bands: what SLOs are counted apart by."""

    def __init__(
        self,
        registry: CollectorRegistry,
        model_name: str,
        slo: SloTargets,
        bands: tuple[str, ...],
    ) -> None:
        self.registry = registry
        self.requests = Counter(
            "tandem_requests_total", "Requests that ended.", ["endpoint", "outcome"], registry=registry
        )
        self.open_requests = Gauge("tandem_open_requests", "Requests the router holds.", registry=registry)
        self.rejected = Counter("tandem_rejected_total", "Requests turned away.", ["reason"], registry=registry)
        self.ttft_s = Histogram(
            "tandem_ttft_seconds", "Arrival to first token.", buckets=TTFT_BUCKETS_S, registry=registry
        )
        self.tpot_s = Histogram(
            "tandem_tpot_seconds",
            "(last - first token time) / (output tokens - 1), by request.",
            buckets=TPOT_BUCKETS_S,
            registry=registry,
        )
        self.prompt_tokens = Counter("tandem_prompt_tokens_total", "Prompt tokens accepted.", registry=registry)
        self.adapter_requests = Counter(
            "tandem_adapter_requests_total", "Requests accepted for a LoRA adapter.", ["adapter"], registry=registry
        )
        self.output_tokens = Counter("tandem_output_tokens_total", "Tokens sent to clients.", registry=registry)
        self.kv_bytes_moved = Counter(
            "tandem_kv_bytes_moved_total", "KV bytes moved between workers for requests.", registry=registry
        )
        self.slo = SloMetrics(registry, slo, bands)
        self.vllm = VllmRouterMetrics(registry, model_name)


class VllmRouterMetrics:
    """The router's share of the model-server protocol (GIE 003), for the one model it serves."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, ["model_name"], registry=registry).labels(model_name)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, ["model_name"], registry=registry).labels(model_name)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(name, text, ["model_name"], buckets=buckets, registry=registry).labels(model_name)

        self.running = gauge("vllm:num_requests_running", "Requests with a first token.")
        self.waiting = gauge("vllm:num_requests_waiting", "Requests without a first token yet.")
        self.ttft_s = histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS_S)
        self.inter_token_s = histogram("vllm:inter_token_latency_seconds", "Gaps between tokens.", TPOT_BUCKETS_S)
        self.end_to_end_s = histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", DURATION_BUCKETS_S)
        self.tpot_s = histogram(
            "vllm:request_time_per_output_token_seconds", "Time per output token, by request.", TPOT_BUCKETS_S
        )
        self.all_prompt_tokens = counter("vllm:prompt_tokens_total", "Prompt tokens accepted.")
        self.all_output_tokens = counter("vllm:generation_tokens_total", "Tokens sent to clients.")
        self.prompt_tokens = histogram("vllm:request_prompt_tokens", "Prompt tokens by request.", TOKEN_BUCKETS)
        self.output_tokens = histogram("vllm:request_generation_tokens", "Output tokens by request.", TOKEN_BUCKETS)
        self.prefix_queries = counter("vllm:prefix_cache_queries_total", "Prompt tokens looked up in prefix caches.")
        self.prefix_hits = counter("vllm:prefix_cache_hits_total", "Prompt tokens found in prefix caches.")
        self._success = Counter(
            "vllm:request_success_total", "Finished requests.", ["model_name", "finished_reason"], registry=registry
        )
        self._model_name = model_name

    def finished(self, reason: str) -> None:
        """Count a request that ended well, by its finish reason ("stop", "length")."""
        self._success.labels(self._model_name, reason).inc()


class HitTier(StrEnum):
    """Where a prompt's beginning is cached, seen from the worker that computes the rest."""

    WORKER = "worker"  # its own, on the device or in a tier below
    PEER = "peer"  # in another worker's, which pushes it


class HedgeOutcome(StrEnum):
    """What became of second attempts; one of two that were lost, cancelled or failed both is only begun."""

    BEGUN = "begun"
    WON = "won"
    LOST = "lost"


class RoutingMetrics:
    """What the dispatcher counts: why each prompt is prefilled where it is, how long requests waited for workers."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._plans = Counter("tandem_router_plans_total", "Workers chosen, by reason.", ["reason"], registry=registry)
        self._replans = Counter(
            "tandem_router_replans_total", "Plans after a first one that came to nothing.", registry=registry
        )
        self._hedges = Counter(
            "tandem_router_hedges_total", "Second attempts before a first token.", ["outcome"], registry=registry
        )
        for outcome in HedgeOutcome:
            self._hedges.labels(outcome)
        self._hit_tokens = Counter(
            "tandem_router_hit_tokens_total",
            "Prompt tokens that plans found cached, by where.",
            ["tier"],
            registry=registry,
        )
        self._queue_s = Histogram(
            "tandem_router_queue_seconds", "Arrival to first plan.", buckets=TTFT_BUCKETS_S, registry=registry
        )
        self._workers_lost = Counter(
            "tandem_router_workers_lost_total", "Workers given up or dead.", ["role"], registry=registry
        )

    def planned(
        self, reason: str, attempt: int | None, waited_s: float, hit_tokens: int = 0, fetched_tokens: int = 0
    ) -> None:
        """Count a plan; `attempt` is 1 for a request's first one, None for a hedge, beside another attempt. Prompt
        tokens that need not be computed: cached where it is prefilled, and to be pushed there by a peer."""
        self._plans.labels(reason).inc()
        self._hit_tokens.labels(HitTier.WORKER).inc(hit_tokens)
        self._hit_tokens.labels(HitTier.PEER).inc(fetched_tokens)
        if attempt is None:
            self._hedges.labels(HedgeOutcome.BEGUN).inc()
        elif attempt == 1:
            self._queue_s.observe(waited_s)
        else:
            self._replans.inc()

    def race_ended(self, *, won: bool) -> None:
        """Count a hedge's end: it had the first token, or the attempt had that it stood beside."""
        self._hedges.labels(HedgeOutcome.WON if won else HedgeOutcome.LOST).inc()

    def worker_lost(self, role: str) -> None:
        """Count a worker that is gone, by its role."""
        self._workers_lost.labels(role).inc()


class PolicyMetrics:
    """What becomes of the operator's policy file."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._reads = Counter(
            "tandem_policy_reads_total", "New contents of the policy file.", ["outcome"], registry=registry
        )
        for outcome in ("applied", "refused"):
            self._reads.labels(outcome)

    def applied(self) -> None:
        """Count contents that hold now."""
        self._reads.labels("applied").inc()

    def refused(self) -> None:
        """Count contents that are wrong: what held before still does."""
        self._reads.labels("refused").inc()


@dataclass(frozen=True, slots=True)
class RouterState:
    """What a router is asked for at each scrape. waiting_requests: in its queue, by band. workers: number by (role,
    life). Blocks: of decode workers. known_blocks: different ones that some worker is known to cache. cache_gaps: times
    that a worker's news of its cache had a gap. avoided_places: whose circuit breaker is not closed."""

    queued_requests: int
    waiting_requests: Mapping[str, int]
    workers: Mapping[tuple[str, str], int]
    held_blocks: int  # used or quarantined
    num_blocks: int
    block_size: int
    known_blocks: int = 0
    cache_gaps: int = 0
    avoided_places: int = 0


class RouterStateCollector(Collector):
    """Reads the dispatcher's view when it is scraped; the KV pools under the names of the model-server protocol too."""

    def __init__(self, read_state: Callable[[], RouterState], model_name: str) -> None:
        self._read_state = read_state
        self._model_name = model_name

    def describe(self) -> Iterable[Metric]:
        """Names without values, as in WorkerStateCollector."""
        return ()

    def collect(self) -> Iterable[Metric]:
        state = self._read_state()
        yield GaugeMetricFamily("tandem_router_queued_requests", "Requests without workers.", state.queued_requests)
        waiting = GaugeMetricFamily("tandem_router_waiting_requests", "Requests not admitted yet.", labels=["band"])
        for band, number in state.waiting_requests.items():
            waiting.add_metric([band], number)
        yield waiting
        workers = GaugeMetricFamily("tandem_router_workers", "Workers known.", labels=["role", "life"])
        for (role, life), number in state.workers.items():
            workers.add_metric([role, life], number)
        yield workers
        yield GaugeMetricFamily("tandem_router_known_blocks", "Blocks known to be cached.", state.known_blocks)
        yield CounterMetricFamily("tandem_router_cache_gaps", "Gaps in news of workers' caches.", state.cache_gaps)
        yield GaugeMetricFamily("tandem_router_avoided_places", "Workers that fail.", state.avoided_places)
        usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Held KV blocks, from 0 to 1.", labels=["model_name"])
        usage.add_metric([self._model_name], state.held_blocks / max(1, state.num_blocks))
        yield usage
        names = ["model_name", "block_size", "num_gpu_blocks"]
        config = GaugeMetricFamily("vllm:cache_config_info", "Shape of the KV pools.", labels=names)
        config.add_metric([self._model_name, str(state.block_size), str(state.num_blocks)], 1)
        yield config
