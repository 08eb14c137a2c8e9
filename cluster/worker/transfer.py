"""A worker's side of KV transfers, built from its configuration: transport, hand-offs, and what drives them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from cluster.worker.addresses import listening_address
from cluster.worker.config import WorkerConfig
from cluster.worker.engine import Engine
from cluster.worker.kv_memory import TensorMemory, memory_of
from core.membership import WorkerRef
from kv_transfer.checksum import BlockChecksums
from kv_transfer.credit import PushCredit
from kv_transfer.driver import HandoffDriver, HandoffOutcome
from kv_transfer.effects import LeaseConfig, LoadFailurePolicy
from kv_transfer.faults import FaultyTransport, TransportFaults
from kv_transfer.nixl import NixlConfig, NixlTransport
from kv_transfer.pace import TransferPace
from kv_transfer.session import HandoffSessions
from kv_transfer.transport import Transport
from telemetry.logs import log_state

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Transfer:
    """probe_memory: on a GPU, where peers' probes land; kept, because the transport has its address only."""

    transport: Transport
    handoffs: HandoffSessions
    driver: HandoffDriver
    probe_memory: TensorMemory | None


def build_transfer(
    config: WorkerConfig,
    me: WorkerRef,
    engine: Engine,
    on_outcome: Callable[[HandoffOutcome], None],
    on_broken: Callable[[BaseException], None],
) -> Transfer:
    """Over the pool of `engine`, which must outlive it."""
    memory = memory_of(engine.runner.kv_pools, engine.pool.num_blocks)
    lease = LeaseConfig(lease_s=config.lease_s, landed_timeout_s=config.lease_s)
    pace = TransferPace(engine.block_bytes)
    policy = LoadFailurePolicy(config.kv_load_failure_policy)
    handoffs = HandoffSessions(me, engine.pool, lease, engine.pool.match, pace.bound_s, policy)
    nixl = NixlConfig(interface=config.kv_interface, address=listening_address(config))
    probe_memory = _probe_memory(engine, nixl.probe_bytes)
    scratch = None if probe_memory is None else memory_of([probe_memory], num_blocks=1)
    transport = _with_faults(NixlTransport(me, engine.identity, memory, nixl, scratch), me, config.kv_faults)
    driver = HandoffDriver(
        transport,
        handoffs,
        time.monotonic,
        on_outcome,
        on_broken=on_broken,
        credit=PushCredit(engine.block_bytes, config.kv_bytes_in_flight),
        pace=pace,
        checksums=BlockChecksums(memory) if config.kv_checksums and memory.memory_kind == "DRAM" else None,
    )
    return Transfer(transport, handoffs, driver, probe_memory)


def _probe_memory(engine: Engine, num_bytes: int) -> TensorMemory | None:
    """Peers' probes land in memory of the pool's kind; on the host the transport allocates it itself."""
    kv_pool = engine.runner.kv_pools[0]
    return kv_pool.new_zeros(num_bytes // kv_pool.itemsize) if kv_pool.is_cuda else None


def _with_faults(transport: Transport, me: WorkerRef, faults: str | None) -> Transport:
    """Where the operator asked for them, and only there."""
    if faults is None:
        return transport
    log_state(logger, logging.WARNING, worker_id=me, state="injecting faults", faults=faults)
    return FaultyTransport(transport, TransportFaults.parse(faults))
