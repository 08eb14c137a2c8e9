"""What a worker is asked for when its metrics are scraped."""

from __future__ import annotations

from cluster.worker.engine import Engine
from cluster.worker.transfer import Transfer
from kv_transfer.prefix_index import PrefixIndex
from telemetry.energy import GpuEnergy
from telemetry.worker_metrics import WorkerState


def read_state(
    engine: Engine,
    transfer: Transfer,
    index: PrefixIndex,
    num_unscheduled: int,
    orphaned_blocks: int,
    price_per_hour: float,
    energy: GpuEnergy | None,
) -> WorkerState:
    """Plain numbers, as they are now; called in the scraping thread.

    Args:
        num_unscheduled: requests that the scheduler does not hold.
        price_per_hour: 0 is not known.
    """
    load, pushes = engine.scheduler.load(), transfer.transport.stats()
    return WorkerState(
        load=load,
        open_requests=load.running_requests + load.waiting_requests + num_unscheduled,
        orphaned_blocks=orphaned_blocks,
        open_handoffs=len(transfer.handoffs),
        preemptions=engine.scheduler.num_preemptions,
        pushes_in_flight=pushes.in_flight,
        zombie_pushes=pushes.zombies,
        peers_lost=pushes.peers_lost,
        index_lookups=index.stats.lookups,
        index_hit_blocks=index.stats.hit_blocks,
        index_failures=index.stats.failures,
        cache_hit_blocks=engine.pool.hit_blocks,
        cache_blocks=engine.pool.num_cached_by_tier(),
        cache_damaged_blocks=engine.pool.tiers.num_damaged,
        block_bytes=engine.block_bytes,
        price_per_hour=price_per_hour or None,
        energy_joules=None if energy is None else energy.joules(),
    )
