"""Every public metric name, in one place.

Two families stand side by side: our own `tandem_*`, and the `vllm:*` names of the model-server protocol that
gateways, autoscalers and dashboards already read. Labels are bounded: enums and the served model's name, never an
id, a tenant or a text. Each class registers its metrics once, in the registry handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

TTFT_BUCKETS_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
# OpenTelemetry GenAI's buckets of time per output token, and a finer start for small models.
TPOT_BUCKETS_S: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
DURATION_BUCKETS_S: Final = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
STEP_BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
STAGE_BUCKETS_S: Final = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
TOKEN_BUCKETS: Final = tuple(float(4**power) for power in range(10))
BYTE_BUCKETS: Final = tuple(float(4**power) for power in range(5, 16))


class Outcome(StrEnum):
    """How a request ended, as the edge saw it."""

    OK = "ok"
    BAD_REQUEST = "bad_request"
    UNAUTHENTICATED = "unauthenticated"
    REJECTED = "rejected"
    CANCELLED = "cancelled"  # the client left
    FAILED = "failed"


class RouterMetrics:
    """What the router's fronts and dispatcher count."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
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
        self.output_tokens = Counter("tandem_output_tokens_total", "Tokens sent to clients.", registry=registry)
        self.kv_bytes_moved = Counter(
            "tandem_kv_bytes_moved_total", "KV bytes moved between workers for requests.", registry=registry
        )
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

    DEVICE = "device"  # in its own KV pool
    PEER = "peer"  # in another worker's, which pushes it


class RoutingMetrics:
    """What the dispatcher counts: why each prompt is prefilled where it is, how long requests waited for workers."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._plans = Counter("tandem_router_plans_total", "Workers chosen, by reason.", ["reason"], registry=registry)
        self._replans = Counter(
            "tandem_router_replans_total", "Plans after a first one that came to nothing.", registry=registry
        )
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

    def planned(self, reason: str, attempt: int, waited_s: float, hit_tokens: int = 0, fetched_tokens: int = 0) -> None:
        """Count a plan; `attempt` is 1 for a request's first one. Prompt tokens that need not be computed: cached where
        the prompt is prefilled, and to be pushed there by a peer."""
        self._plans.labels(reason).inc()
        self._hit_tokens.labels(HitTier.DEVICE).inc(hit_tokens)
        self._hit_tokens.labels(HitTier.PEER).inc(fetched_tokens)
        if attempt == 1:
            self._queue_s.observe(waited_s)
        else:
            self._replans.inc()

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


class BlockState(StrEnum):
    """What a KV block of a worker is doing."""

    FREE = "free"  # free, or cached and evictable
    USED = "used"  # held by requests or hand-offs
    QUARANTINED = "quarantined"  # a write may still come


class TokenKind(StrEnum):
    """Why a worker computed a token."""

    PREFILL = "prefill"
    DECODE = "decode"


class PushOutcome(StrEnum):
    """How a KV push ended on the side that wrote."""

    DONE = "done"
    FAILED = "failed"


class TransferStage(StrEnum):
    """What a hand-off's time went into."""

    WAIT = "wait"  # source: from ready to posted: for the peer's credit, and for checksums
    PUSH = "push"  # source: from posted to settled
    LAND = "land"  # source: from the last push asked for until the target said that all arrived
    VERIFY = "verify"  # target: comparing checksums of a push


class TransferPart(StrEnum):
    """Whether there was anything left to compute while bytes were on their way."""

    HIDDEN = "hidden"
    EXPOSED = "exposed"


@dataclass(frozen=True, slots=True)
class WorkerState:
    """What a worker is asked for at each scrape: gauges as they are now, totals since start."""

    free_blocks: int
    used_blocks: int
    quarantined_blocks: int
    running_requests: int
    waiting_requests: int
    open_requests: int
    orphaned_blocks: int
    open_handoffs: int
    preemptions: int
    pushes_in_flight: int
    zombie_pushes: int
    peers_lost: int
    index_lookups: int
    index_hit_blocks: int
    index_failures: int


class WorkerMetrics:
    """What one worker counts: engine steps, KV blocks, pushes, the shared prefix index.

    read_state: called in the scraping thread; plain numbers, so no lock is needed.
    """

    def __init__(self, registry: CollectorRegistry, read_state: Callable[[], WorkerState]) -> None:
        self.registry = registry
        self.step_s = Histogram(
            "tandem_worker_step_seconds", "Time of one engine step.", buckets=STEP_BUCKETS_S, registry=registry
        )
        self.tokens = Counter("tandem_worker_tokens_total", "Tokens computed.", ["kind"], registry=registry)
        self.pushes = Counter("tandem_kv_transfer_pushes_total", "KV pushes ended.", ["outcome"], registry=registry)
        self.pushed_bytes = Counter("tandem_kv_transfer_bytes_total", "KV bytes this worker wrote.", registry=registry)
        self.push_s = Histogram(
            "tandem_kv_transfer_push_seconds", "Time of one push.", buckets=STEP_BUCKETS_S, registry=registry
        )
        self.push_bytes = Histogram(
            "tandem_kv_transfer_push_bytes", "Size of one push.", buckets=BYTE_BUCKETS, registry=registry
        )
        self._stage_s = Histogram(
            "tandem_kv_transfer_stage_seconds",
            "Time of a push or hand-off by stage.",
            ["stage"],
            buckets=STAGE_BUCKETS_S,
            registry=registry,
        )
        self._transfer_s = Counter(
            "tandem_kv_transfer_seconds_total",
            "Time that pushes took, hidden behind computing or not.",
            ["part"],
            registry=registry,
        )
        self._damaged = Counter(
            "tandem_kv_transfer_damaged_pushes_total",
            "Pushes to this worker whose checksums did not fit.",
            registry=registry,
        )
        registry.register(WorkerStateCollector(read_state))

    def step_done(self, duration_s: float, prefill_tokens: int, decode_tokens: int) -> None:
        """Count one engine step and the tokens it computed."""
        self.step_s.observe(duration_s)
        self.tokens.labels(TokenKind.PREFILL).inc(prefill_tokens)
        self.tokens.labels(TokenKind.DECODE).inc(decode_tokens)

    def push_done(
        self, outcome: PushOutcome, num_bytes: int, wait_s: float, duration_s: float, exposed_s: float
    ) -> None:
        """Count one push, and its bytes if they arrived."""
        self.pushes.labels(outcome).inc()
        self._stage_s.labels(TransferStage.WAIT).observe(wait_s)
        self._stage_s.labels(TransferStage.PUSH).observe(duration_s)
        self._transfer_s.labels(TransferPart.EXPOSED).inc(exposed_s)
        self._transfer_s.labels(TransferPart.HIDDEN).inc(wait_s + duration_s - exposed_s)
        if outcome is PushOutcome.DONE:
            self.pushed_bytes.inc(num_bytes)
            self.push_bytes.observe(num_bytes)
            self.push_s.observe(duration_s)

    def landed(self, duration_s: float) -> None:
        """Count a hand-off of which this worker was the source, by the time since its last push."""
        self._stage_s.labels(TransferStage.LAND).observe(duration_s)

    def verified(self, duration_s: float, whole: bool) -> None:
        """Count a push to this worker whose checksums were compared."""
        self._stage_s.labels(TransferStage.VERIFY).observe(duration_s)
        self._damaged.inc(not whole)


class WorkerStateCollector(Collector):
    """Reads a worker's state when it is scraped, so that nothing is kept twice."""

    def __init__(self, read_state: Callable[[], WorkerState]) -> None:
        self._read_state = read_state

    def describe(self) -> Iterable[Metric]:
        """Names without values: registering must not read a worker that is still being built."""
        return ()

    def collect(self) -> Iterable[Metric]:
        state = self._read_state()
        blocks = GaugeMetricFamily("tandem_worker_blocks", "KV blocks by state.", labels=["state"])
        blocks.add_metric([BlockState.FREE], state.free_blocks)
        blocks.add_metric([BlockState.USED], state.used_blocks)
        blocks.add_metric([BlockState.QUARANTINED], state.quarantined_blocks)
        yield blocks
        yield GaugeMetricFamily("tandem_worker_running_requests", "Requests in the batch.", state.running_requests)
        yield GaugeMetricFamily("tandem_worker_waiting_requests", "Requests not begun.", state.waiting_requests)
        yield GaugeMetricFamily("tandem_worker_open_requests", "Requests not ended here.", state.open_requests)
        yield GaugeMetricFamily(
            "tandem_worker_orphaned_blocks", "Blocks held when all work had last ended.", state.orphaned_blocks
        )
        yield GaugeMetricFamily("tandem_kv_handoffs_open", "Hand-offs not ended on this side.", state.open_handoffs)
        yield GaugeMetricFamily(
            "tandem_kv_transfer_in_flight", "Operations posted and not settled.", state.pushes_in_flight
        )
        yield GaugeMetricFamily(
            "tandem_kv_transfer_zombies", "Of these, to a peer that was dropped or lost.", state.zombie_pushes
        )
        yield CounterMetricFamily("tandem_kv_transfer_peers_lost", "Paths to peers that broke.", state.peers_lost)
        yield CounterMetricFamily("tandem_worker_preemptions", "Requests preempted.", state.preemptions)
        yield CounterMetricFamily("tandem_prefix_lookups", "Questions to the shared index.", state.index_lookups)
        yield CounterMetricFamily("tandem_prefix_hit_blocks", "Blocks found in it.", state.index_hit_blocks)
        yield CounterMetricFamily(
            "tandem_prefix_index_errors", "Calls to it that failed or timed out.", state.index_failures
        )
