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
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Final

import grpc
from prometheus_client import CollectorRegistry, start_http_server
from tandem.v1 import worker_pb2_grpc as pb_grpc

from cluster.addresses import listening_address
from cluster.affinity import require_interfaces, run_on_numa_node
from cluster.announcing import announce_forever
from cluster.peers import Peers
from cluster.router_streams import RouterStream, RouterStreams
from cluster.routers import with_each_router
from cluster.worker_config import WorkerConfig
from cluster.worker_engine import Engine, build_engine
from cluster.worker_role import Drain, WorkerRole
from cluster.worker_service import WorkerServicer
from cluster.worker_state import read_state
from cluster.worker_traces import WorkerTraces
from cluster.worker_transfer import build_transfer
from core.errors import BadRequest
from core.membership import Role, WorkerInfo, WorkerLoad, WorkerRef
from core.messages import (
    Answer,
    CancelRequest,
    Command,
    PeerDead,
    PeerJoined,
    Refused,
    RefuseReason,
    ReserveBlocks,
    ResyncCache,
    StartGeneration,
    StartPrefill,
)
from core.request import Grammar, TokenDelta
from decode_worker.service import DecodeService
from decode_worker.session import DecodeConfig, DecodeSession
from engine.gpu.device import gpu_uuid
from engine.loop import EngineLoop, StepReport
from engine.step import Progress
from kv_transfer.driver import Outcome, PushReport
from kv_transfer.prefix_index import NoPrefixIndex, PrefixIndex, RedisPrefixIndex
from prefill_worker.service import PrefillService
from prefill_worker.session import PrefillConfig, PrefillSession
from telemetry.energy import gpu_energy
from telemetry.logs import log_state
from telemetry.open_tracer import open_tracer
from telemetry.tasks import EXIT_INVARIANT_BROKEN, BackgroundTasks, end_process
from telemetry.worker_metrics import PushOutcome, WorkerMetrics, WorkerState

logger = logging.getLogger(__name__)

TICK_INTERVAL_S: Final = 0.1
LOAD_INTERVAL_S: Final = 1.0
DRAIN_POLL_S: Final = 0.01
INDEX_TTL_S: Final = 300.0
MAX_MESSAGE_BYTES: Final = 64 << 20


class WorkerHost:
    """Started once, stopped once; every method in the process's one event loop."""

    async def start(self, config: WorkerConfig) -> WorkerInfo:
        """Raises BadModel or BadRequest: the configuration cannot be served."""
        require_interfaces(config.kv_interface)
        if config.numa_node is not None:
            run_on_numa_node(config.numa_node)
        self._config = config
        self._orphaned_blocks = 0
        self._tasks = BackgroundTasks(self._broken)
        self._ref = WorkerRef(config.worker_id, config.incarnation)
        # The router has decided: what comes without a traceparent is not traced.
        registry = CollectorRegistry()
        tracer = open_tracer(config.trace_endpoint, 0.0, "tandem-worker", str(self._ref), registry)
        self._traces = WorkerTraces(tracer, self._ref)
        self._engine: Engine = await asyncio.to_thread(build_engine, config, self._broken)
        self._energy = gpu_energy([uuid for pool in self._engine.runner.kv_pools if (uuid := gpu_uuid(pool))])
        self._build_transfer()
        scheduler, handoffs = self._engine.scheduler, self._transfer.handoffs
        self._role = WorkerRole(config.role, self._make_service, self._streams.send, scheduler, handoffs)
        self._loop = EngineLoop(self._engine.scheduler, self._engine.runner, self._stepped)
        self._metrics = WorkerMetrics(registry, self._state)
        listener = self._transfer.driver.listener
        listener.pushed, listener.landed, listener.verified = self._pushed, self._metrics.landed, self._metrics.verified
        await self._listen()
        self._tasks.watch(self._loop.start())
        self._tier_driver = self._engine.tiers.driver(self._blocks_read) if self._engine.tiers else None
        if self._tier_driver is not None:
            self._tasks.watch(self._tier_driver.start())
        announcing = with_each_router(config.router_addresses, partial(announce_forever, self._read_self))
        for work in (announcing, self._tick_forever(), self._refresh_index_forever()):
            self._tasks.spawn(work)
        return self._info

    async def drain(self, timeout_s: float, finish_s: float) -> str:
        """Take nothing new, for good. Returns what is left when nothing is open, or after `timeout_s`."""
        return await self._drained(self._role.drain(timeout_s, finish_s, time.monotonic()))

    async def switch_role(self, role: Role, timeout_s: float, finish_s: float) -> str:
        """Drain, then serve as `role`. Returns why it does not; nothing when it does."""
        return await self._drained(self._role.drain(timeout_s, finish_s, time.monotonic(), to=role))

    async def _drained(self, drain: Drain) -> str:
        while drain.outcome is None:
            self._role.poll(time.monotonic())
            await asyncio.sleep(DRAIN_POLL_S)
        return drain.outcome

    async def stop(self) -> None:
        """Close servers, engine and transport. What still runs ends with an error at its router."""
        self._tasks.cancel()
        await self._peers.close()
        await self._server.stop(grace=0.2)
        await self._loop.stop()
        if self._tier_driver is not None:
            await self._tier_driver.stop()
        await self._transfer.driver.close(timeout_s=2.0)
        await self._index.close()
        self._metrics_server.shutdown()
        await self._traces.close()

    # --- construction -------------------------------------------------------------------------------------------

    def _build_transfer(self) -> None:
        config, engine = self._config, self._engine
        self._transfer = build_transfer(config, self._ref, engine, self._handoff_ended, self._broken)
        self._streams = RouterStreams(engine.pool)
        transport, driver = self._transfer.transport, self._transfer.driver
        self._peers = Peers(transport.describe(), driver, self._streams.send, self._tasks.spawn)
        url, digest = config.redis_url, engine.identity.digest()
        self._index: PrefixIndex = RedisPrefixIndex(url, self._ref, digest, INDEX_TTL_S) if url else NoPrefixIndex()

    def _make_service(self, role: Role) -> PrefillService | DecodeService:
        engine, send = self._engine, self._answer
        handoffs, driver = self._transfer.handoffs, self._transfer.driver
        if role is Role.PREFILL:
            prefill = PrefillSession(PrefillConfig(block_bytes=engine.block_bytes), engine.scheduler, handoffs)
            return PrefillService(
                prefill,
                driver,
                self._index,
                self._peers.is_connected,
                send,
                self._wake,
                self._tasks.spawn,
                time.monotonic,
            )
        decode = DecodeSession(DecodeConfig(block_bytes=engine.block_bytes), engine.scheduler, handoffs)
        return DecodeService(decode, driver, send, self._wake, time.monotonic)

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
            on_open=self._introduce,
            on_command=self._command,
            on_closed=self._router_closed,
            spawn=self._tasks.spawn,
        )
        pb_grpc.add_WorkerServiceServicer_to_server(servicer, self._server)
        host = listening_address(self._config)
        port = self._server.add_insecure_port(f"{host}:0")
        await self._server.start()
        self._metrics_server, _thread = start_http_server(self._config.metrics_port, host, self._metrics.registry)
        engine = self._engine
        self._info = WorkerInfo(
            ref=self._ref,
            role=self._config.role,
            address=f"{host}:{port}",
            identity_digest=engine.identity.digest(),
            block_size=self._config.block_size,
            block_bytes=engine.block_bytes,
            num_blocks=engine.pool.num_blocks,
            max_context_tokens=engine.runner.max_context_tokens,
            metrics_address=f"{host}:{self._metrics_server.server_port}",
            nvlink_domain=self._config.nvlink_domain,
            adapters=engine.adapters,
            num_tier_blocks=sum(engine.pool.tiers.num_slots.values()),
        )

    # --- what happens -------------------------------------------------------------------------------------------

    def _command(self, stream: RouterStream, command: Command) -> None:
        match command:
            case PeerJoined(worker):
                self._peers.joined(worker)
            case PeerDead(worker):
                self._tasks.spawn(self._peers.dead(worker))
                self._tasks.spawn(self._index.purge(worker))
            case ResyncCache():
                stream.feed.begin_again()
                self._say(())
            case CancelRequest(request_id):
                self._cancel(request_id)
                self._streams.disown(request_id)
            case StartGeneration() | ReserveBlocks() | StartPrefill():
                self._streams.own(stream, command)
                self._traces.begin(command)
                self._begin(command)

    def _begin(self, command: StartGeneration | ReserveBlocks | StartPrefill) -> None:
        request_id, grammar = command.request.request_id, command.request.grammar
        if self._role.draining:
            self._answer(Refused(request_id, RefuseReason.DRAINING))
        elif grammar is not None and not self._engine.grammars.has(grammar):
            self._tasks.spawn(self._compile_first(command, request_id, grammar))
        else:
            self._role.service.command(command)

    async def _compile_first(
        self, command: StartGeneration | ReserveBlocks | StartPrefill, request_id: str, grammar: Grammar
    ) -> None:
        """Compiling may take as long as several steps. A request that is cancelled meanwhile never starts."""
        try:
            await asyncio.to_thread(self._engine.grammars.matcher, grammar)
        except BadRequest as error:
            self._answer(Refused(request_id, RefuseReason.BAD_REQUEST, str(error)))
            return
        if self._streams.owns(request_id):
            self._begin(command)

    def _router_closed(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._cancel(request_id)

    def _cancel(self, request_id: str) -> None:
        self._role.service.command(CancelRequest(request_id))
        self._traces.end(request_id, "cancelled")

    def _answer(self, answer: Answer) -> None:
        self._traces.answered(answer)
        self._streams.send(answer)

    def _stepped(self, progress: list[Progress], report: StepReport) -> None:
        self._metrics.step_done(report.duration_s, report.prefill_tokens, report.decode_tokens)
        self._say(self._role.service.stepped(progress))
        self._traces.stepped(progress)
        for item in progress:
            if item.ended:
                self._streams.disown(item.request_id)

    def _handoff_ended(self, outcome: Outcome) -> None:
        self._role.service.handoff_ended(outcome)
        self._traces.handoff_ended(outcome)

    def _wake(self) -> None:
        self._loop.wake()

    def _blocks_read(self) -> None:
        """Some of what requests wait for has come from the disk, or never will: they may have room now."""
        self._role.service.tick()
        self._wake()

    def _introduce(self) -> None:
        """To a router whose stream has opened."""
        self._streams.send(self._role.state(time.monotonic()))
        self._say(())

    def _say(self, deltas: Iterable[TokenDelta]) -> None:
        """Tell every router its tokens and the load; and routers and the shared index what became findable here and
        what ceased to be."""
        changes = self._engine.pool.moves.take()
        self._streams.step(deltas, self._engine.scheduler.load(), changes)
        if changes.stored:
            self._tasks.spawn(self._index.announce(changes.stored))
        if changes.evicted:
            self._tasks.spawn(self._index.withdraw(changes.evicted))

    # --- time -----------------------------------------------------------------------------------------------------

    async def _tick_forever(self) -> None:
        load_at_s, idle = 0.0, True
        while True:
            await asyncio.sleep(TICK_INTERVAL_S)
            self._transfer.driver.tick()
            self._role.service.tick()
            if time.monotonic() >= load_at_s or self._streams.behind or self._engine.pool.moves.any:
                load_at_s = time.monotonic() + LOAD_INTERVAL_S
                self._say(())
            if idle is bool(self._role.held()):
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
        return replace(self._info, role=self._role.role), self._engine.scheduler.load()

    async def _refresh_index_forever(self) -> None:
        """Entries in the shared index end by themselves unless they are said again."""
        while True:
            await asyncio.sleep(INDEX_TTL_S / 3)
            await self._index.announce(self._engine.pool.cached_hashes())

    # --- metrics --------------------------------------------------------------------------------------------------

    def _pushed(self, push: PushReport) -> None:
        outcome = PushOutcome.DONE if push.delivered else PushOutcome.FAILED
        num_bytes = push.num_blocks * self._engine.block_bytes
        self._metrics.push_done(outcome, num_bytes, push.wait_s, push.push_s, push.exposed_s)

    def _state(self) -> WorkerState:
        return read_state(
            self._engine,
            self._transfer,
            self._index,
            len(self._role.service),
            self._orphaned_blocks,
            self._config.price_per_hour,
            self._energy,
        )

    # --- the end of a worker that is broken -----------------------------------------------------------------------

    def _broken(self, error: BaseException) -> None:
        logger.critical("not expected", exc_info=error)
        end_process(EXIT_INVARIANT_BROKEN, str(error), worker_id=self._ref)
