"""Every public metric name of a worker; labels are bounded, as in telemetry/router_metrics.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from core.blocks import CacheTier
from core.membership import WorkerLoad
from telemetry.buckets import BYTE_BUCKETS, STAGE_BUCKETS_S, STEP_BUCKETS_S


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
    """What a worker is asked for at each scrape: gauges as they are now, totals since start. What is None is not known,
    and no series says anything of it."""

    load: WorkerLoad
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
    cache_hit_blocks: Mapping[CacheTier, int]
    cache_blocks: Mapping[CacheTier, int]  # of the tiers that there are
    cache_damaged_blocks: int
    block_bytes: int
    price_per_hour: float | None
    energy_joules: float | None


class WorkerMetrics:
    """What one worker counts: engine steps, KV blocks, pushes, the shared prefix index.

    read_state: called in the scraping thread; plain numbers, so no lock is needed.
    """

    def __init__(self, registry: CollectorRegistry, read_state: Callable[[], WorkerState]) -> None:
        self.registry = registry
        self._step_s = Histogram(
            "tandem_worker_step_seconds", "Time of one engine step.", buckets=STEP_BUCKETS_S, registry=registry
        )
        self._tokens = Counter("tandem_worker_tokens_total", "Tokens computed.", ["kind"], registry=registry)
        self._pushes = Counter("tandem_kv_transfer_pushes_total", "KV pushes ended.", ["outcome"], registry=registry)
        self._pushed_bytes = Counter("tandem_kv_transfer_bytes_total", "KV bytes this worker wrote.", registry=registry)
        self._push_bytes = Histogram(
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
        self._step_s.observe(duration_s)
        self._tokens.labels(TokenKind.PREFILL).inc(prefill_tokens)
        self._tokens.labels(TokenKind.DECODE).inc(decode_tokens)

    def push_done(
        self, outcome: PushOutcome, num_bytes: int, wait_s: float, duration_s: float, exposed_s: float
    ) -> None:
        """Count one push, and its bytes if they arrived."""
        self._pushes.labels(outcome).inc()
        self._stage_s.labels(TransferStage.WAIT).observe(wait_s)
        self._stage_s.labels(TransferStage.PUSH).observe(duration_s)
        self._transfer_s.labels(TransferPart.EXPOSED).inc(exposed_s)
        self._transfer_s.labels(TransferPart.HIDDEN).inc(wait_s + duration_s - exposed_s)
        if outcome is PushOutcome.DONE:
            self._pushed_bytes.inc(num_bytes)
            self._push_bytes.observe(num_bytes)

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
        load = state.load
        blocks = GaugeMetricFamily("tandem_worker_blocks", "KV blocks by state.", labels=["state"])
        blocks.add_metric([BlockState.FREE], load.free_blocks)
        blocks.add_metric([BlockState.USED], load.used_blocks)
        blocks.add_metric([BlockState.QUARANTINED], load.quarantined_blocks)
        yield blocks
        yield GaugeMetricFamily("tandem_worker_running_requests", "Requests in the batch.", load.running_requests)
        yield GaugeMetricFamily("tandem_worker_waiting_requests", "Requests not begun.", load.waiting_requests)
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
        yield from _cache(state)
        if state.price_per_hour is not None:
            yield GaugeMetricFamily("tandem_worker_price_per_hour", "What its place costs.", state.price_per_hour)
        if state.energy_joules is not None:
            yield CounterMetricFamily("tandem_worker_energy_joules", "Energy of its GPU.", state.energy_joules)


def _cache(state: WorkerState) -> Iterable[Metric]:
    hits = CounterMetricFamily(
        "tandem_cache_hit_blocks", "Blocks that requests found in this worker's cache, by tier.", labels=["tier"]
    )
    for tier, num_blocks in state.cache_hit_blocks.items():
        hits.add_metric([tier], num_blocks)
    yield hits
    blocks = GaugeMetricFamily("tandem_cache_blocks", "Blocks that can be found there.", labels=["tier"])
    kv_bytes = GaugeMetricFamily("tandem_cache_bytes", "Their bytes.", labels=["tier"])
    for tier, num_blocks in state.cache_blocks.items():
        blocks.add_metric([tier], num_blocks)
        kv_bytes.add_metric([tier], num_blocks * state.block_bytes)
    yield blocks
    yield kv_bytes
    yield CounterMetricFamily(
        "tandem_cache_damaged_blocks", "Blocks that the disk tier gave back damaged.", state.cache_damaged_blocks
    )
