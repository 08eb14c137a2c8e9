"""One worker process: model, KV pool, transport, role, and the gRPC server that routers and peers call.

1. Load weights; the KV pool is zeroed and registered with the transport.
2. Listen; announce to every router once a second, which dials back and introduces the other workers.
3. Serve: commands come in over the routers' streams, steps run, tokens go out, KV moves.
4. Drain: take nothing new, let what runs end or leave. Then stop, or serve again, perhaps as the other role.
A state that must not exist ends the process: its keeper starts a new incarnation.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from functools import partial
from typing import Final

import grpc
from prometheus_client import CollectorRegistry, start_http_server
from tandem.v1 import worker_pb2_grpc as pb_grpc

from cluster.routers import with_each_router
from cluster.worker.addresses import listening_address
from cluster.worker.affinity import require_interfaces, run_on_numa_node
from cluster.worker.announcing import announce_forever
from cluster.worker.config import WorkerConfig
from cluster.worker.engine import Engine, build_engine
from cluster.worker.peers import Peers
from cluster.worker.requests import Requests
from cluster.worker.role import Drain
from cluster.worker.router_streams import RouterStreams
from cluster.worker.service import WorkerServicer
from cluster.worker.state import read_state
from cluster.worker.traces import WorkerTraces
from cluster.worker.transfer import build_transfer
from core.membership import Role, WorkerInfo, WorkerLoad, WorkerRef
from engine.gpu.device import gpu_uuid
from kv_transfer.driver import HandoffOutcome, PushReport
from kv_transfer.prefix_index import NoPrefixIndex, PrefixIndex, RedisPrefixIndex
from telemetry.energy import gpu_energy
from telemetry.logs import log_state
from telemetry.open_tracer import open_tracer
from telemetry.tasks import BackgroundTasks, end_broken
from telemetry.worker_metrics import PushOutcome, WorkerMetrics, WorkerState

logger = logging.getLogger(__name__)

TICK_INTERVAL_S: Final = 0.1
LOAD_INTERVAL_S: Final = 1.0
DRAIN_POLL_S: Final = 0.01
INDEX_TTL_S: Final = 300.0
MAX_MESSAGE_BYTES: Final = 64 << 20


class WorkerProcess:
    """Started once, stopped once; every method in the process's one event loop."""

    async def start(self, config: WorkerConfig) -> WorkerInfo:
        """Raises BadModel or BadRequest: the configuration cannot be served."""
        require_interfaces(config.kv_interface)
        if config.numa_node is not None:
            run_on_numa_node(config.numa_node)
        self._config = config
        self._orphaned_blocks = 0
        self._ref = WorkerRef(config.worker_id, config.incarnation)
        self._broken = partial(end_broken, worker_id=self._ref)
        self._tasks = BackgroundTasks(self._broken)
        # The router has decided: what comes without a traceparent is not traced.
        registry = CollectorRegistry()
        tracer = open_tracer(config.trace_endpoint, 0.0, "tandem-worker", str(self._ref), registry)
        self._traces = WorkerTraces(tracer, self._ref)
        self._engine: Engine = await asyncio.to_thread(build_engine, config, self._broken)
        self._energy = gpu_energy([uuid for pool in self._engine.runner.kv_pools if (uuid := gpu_uuid(pool))])
        self._metrics = WorkerMetrics(registry, self._state)
        self._build()
        await self._listen()
        self._tasks.watch(self._requests.loop.start())
        self._tier_driver = self._engine.tiers.driver(self._requests.blocks_read) if self._engine.tiers else None
        if self._tier_driver is not None:
            self._tasks.watch(self._tier_driver.start())
        announcing = with_each_router(config.router_addresses, partial(announce_forever, self._read_self))
        for work in (announcing, self._tick_forever(), self._refresh_index_forever()):
            self._tasks.spawn(work)
        return self._info

    async def drain(self, timeout_s: float, finish_s: float) -> str:
        """Take nothing new, for good. Returns what is left when nothing is open, or after `timeout_s`."""
        return await self._drained(self._requests.role.drain(timeout_s, finish_s, time.monotonic()))

    async def switch_role(self, role: Role, timeout_s: float, finish_s: float) -> str:
        """Drain, then serve as `role`. Returns why it does not; nothing when it does."""
        return await self._drained(self._requests.role.drain(timeout_s, finish_s, time.monotonic(), to=role))

    async def _drained(self, drain: Drain) -> str:
        while drain.outcome is None:
            self._requests.role.poll(time.monotonic())
            await asyncio.sleep(DRAIN_POLL_S)
        return drain.outcome

    async def stop(self) -> None:
        """Close servers, engine and transport. What still runs ends with an error at its router."""
        self._tasks.cancel()
        await self._peers.close()
        await self._server.stop(grace=0.2)
        await self._requests.loop.stop()
        if self._tier_driver is not None:
            await self._tier_driver.stop()
        await self._transfer.driver.close(timeout_s=2.0)
        await self._index.close()
        self._metrics_server.shutdown()
        await self._traces.close()

    # --- construction -------------------------------------------------------------------------------------------

    def _build(self) -> None:
        """What stands on the engine."""
        config, engine, spawn = self._config, self._engine, self._tasks.spawn
        self._transfer = build_transfer(config, self._ref, engine, self._handoff_ended, self._broken)
        self._streams = RouterStreams(engine.pool, engine.scheduler.holds)
        transport, driver = self._transfer.transport, self._transfer.driver
        self._peers = Peers(transport.describe(), driver, self._streams.send, spawn)
        url, digest = config.redis_url, engine.identity.digest()
        self._index: PrefixIndex = RedisPrefixIndex(url, self._ref, digest, INDEX_TTL_S) if url else NoPrefixIndex()
        self._requests = Requests(
            config.role,
            engine,
            self._transfer,
            self._streams,
            self._peers,
            self._index,
            self._traces,
            self._metrics,
            spawn,
            config.cpu_core,
        )
        listener, metrics = driver.listener, self._metrics
        listener.pushed, listener.landed, listener.verified = self._pushed, metrics.landed, metrics.verified

    async def _listen(self) -> None:
        options = (
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.so_reuseport", 0),
        )
        self._server = grpc.aio.server(options=options)
        servicer = WorkerServicer(
            self._ref,
            self._transfer.transport.describe(),
            self._streams,
            on_open=self._requests.introduce,
            on_command=self._requests.command,
            on_closed=self._requests.abandoned,
            spawn=self._tasks.spawn,
        )
        pb_grpc.add_WorkerServiceServicer_to_server(servicer, self._server)
        host = listening_address(self._config)
        port = self._server.add_insecure_port(f"{host}:0")
        await self._server.start()
        self._metrics_server, _thread = start_http_server(self._config.metrics_port, host, self._metrics.registry)
        self._info = self._describe(f"{host}:{port}", f"{host}:{self._metrics_server.server_port}")

    def _describe(self, address: str, metrics_address: str) -> WorkerInfo:
        engine = self._engine
        return WorkerInfo(
            ref=self._ref,
            role=self._config.role,
            address=address,
            identity_digest=engine.identity.digest(),
            block_size=self._config.block_size,
            block_bytes=engine.block_bytes,
            num_blocks=engine.pool.num_blocks,
            max_context_tokens=engine.runner.max_context_tokens,
            metrics_address=metrics_address,
            nvlink_domain=self._config.nvlink_domain,
            adapters=engine.adapters,
            num_tier_blocks=sum(engine.pool.tiers.num_slots.values()),
        )

    # --- time -----------------------------------------------------------------------------------------------------

    async def _tick_forever(self) -> None:
        load_at_s, idle = 0.0, True
        while True:
            await asyncio.sleep(TICK_INTERVAL_S)
            self._transfer.driver.tick()
            self._requests.role.service.tick()
            if time.monotonic() >= load_at_s or self._streams.behind or self._engine.pool.moves.any:
                load_at_s = time.monotonic() + LOAD_INTERVAL_S
                self._requests.say(())
            if idle is bool(self._requests.role.held()):
                idle = not idle
                if idle:
                    self._check_pool()

    def _check_pool(self) -> None:
        """Once for each time that all work has ended: every block is in one place, and nobody holds any."""
        pool = self._engine.pool
        pool.check()
        self._orphaned_blocks = pool.num_used
        if pool.num_used:
            log_state(logger, logging.ERROR, worker_id=self._ref, state="orphaned", num_blocks=pool.num_used)

    def _read_self(self) -> tuple[WorkerInfo, WorkerLoad]:
        return replace(self._info, role=self._requests.role.role), self._engine.scheduler.load()

    async def _refresh_index_forever(self) -> None:
        """Entries in the shared index end by themselves unless they are said again."""
        while True:
            await asyncio.sleep(INDEX_TTL_S / 3)
            await self._index.announce(self._engine.pool.cached_hashes())

    # --- what the transfer says -----------------------------------------------------------------------------------

    def _handoff_ended(self, outcome: HandoffOutcome) -> None:
        self._requests.handoff_ended(outcome)  # which are made of the transfer, so after it

    def _pushed(self, push: PushReport) -> None:
        outcome = PushOutcome.DONE if push.delivered else PushOutcome.FAILED
        num_bytes = push.num_blocks * self._engine.block_bytes
        self._metrics.push_done(outcome, num_bytes, push.wait_s, push.push_s, push.exposed_s)

    # --- metrics --------------------------------------------------------------------------------------------------

    def _state(self) -> WorkerState:
        return read_state(
            self._engine,
            self._transfer,
            self._index,
            len(self._requests.role.service),
            self._orphaned_blocks,
            self._config.price_per_hour,
            self._energy,
        )
