"""The requests of one worker: what a router's command sets off, and what routers hear of what came of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from cluster.worker.engine import Engine
from cluster.worker.peers import Peers
from cluster.worker.role import WorkerRole
from cluster.worker.router_streams import RouterStream, RouterStreams
from cluster.worker.traces import WorkerTraces
from cluster.worker.transfer import Transfer
from core.errors import BadRequest
from core.membership import Role
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
from engine.loop import EngineLoop, StepReport
from engine.step import Progress, StepPlan
from kv_transfer.driver import HandoffOutcome
from kv_transfer.prefix_index import PrefixIndex
from prefill_worker.service import PrefillService
from prefill_worker.session import PrefillConfig, PrefillSession
from telemetry.tasks import Spawn
from telemetry.worker_metrics import WorkerMetrics

TELL_TIMEOUT_S: Final = 0.02  # writing takes less than a millisecond


class Requests:
    """role: what serves them. loop: what computes them; whoever made this starts and stops it."""

    def __init__(
        self,
        role: Role,
        engine: Engine,
        transfer: Transfer,
        streams: RouterStreams,
        peers: Peers,
        index: PrefixIndex,
        traces: WorkerTraces,
        metrics: WorkerMetrics,
        spawn: Spawn,
        cpu_core: int | None,
    ) -> None:
        self._engine = engine
        self._transfer = transfer
        self._streams = streams
        self._peers = peers
        self._index = index
        self._traces = traces
        self._metrics = metrics
        self._spawn = spawn
        self.loop = EngineLoop(engine.scheduler, engine.runner, self._stepped, self._planned, cpu_core)
        self.role = WorkerRole(role, self._make_service, streams.send, engine.scheduler, transfer.handoffs)

    def command(self, stream: RouterStream, command: Command) -> None:
        """It came over `stream`."""
        match command:
            case PeerJoined(worker):
                self._peers.joined(worker)
            case PeerDead(worker):
                self._spawn(self._peers.dead(worker))
                self._spawn(self._index.purge(worker))
            case ResyncCache():
                stream.feed.begin_again()
                self.say(())
            case CancelRequest(request_id):
                self._cancel(request_id)
                self._streams.disown(request_id)
            case StartGeneration() | ReserveBlocks() | StartPrefill():
                self._streams.own(stream, command)
                self._traces.begin(command)
                self._begin(command)

    def abandoned(self, request_ids: Iterable[str]) -> None:
        """Nobody waits for these any more: their router's stream has closed."""
        for request_id in request_ids:
            self._cancel(request_id)

    def introduce(self) -> None:
        """To a router whose stream has opened."""
        self._streams.send(self.role.state(time.monotonic()))
        self.say(())

    def handoff_ended(self, outcome: HandoffOutcome) -> None:
        """As the driver says it."""
        self.role.service.handoff_ended(outcome)
        self._traces.handoff_ended(outcome)

    def blocks_read(self) -> None:
        """Some of what requests wait for has come from the disk, or never will: they may have room now."""
        self.role.service.tick()
        self.loop.wake()

    def say(self, deltas: Iterable[TokenDelta]) -> None:
        """Tell every router its tokens and the load; and routers and the shared index what became findable here and
        what ceased to be."""
        changes = self._engine.pool.moves.take()
        self._streams.step(deltas, self._engine.scheduler.load(), changes)
        if changes.stored:
            self._spawn(self._index.announce(changes.stored))
        if changes.evicted:
            self._spawn(self._index.withdraw(changes.evicted))

    def _make_service(self, role: Role) -> PrefillService | DecodeService:
        engine, handoffs, driver = self._engine, self._transfer.handoffs, self._transfer.driver
        send, wake = self._answer, self.loop.wake
        if role is Role.PREFILL:
            prefill = PrefillSession(PrefillConfig(block_bytes=engine.block_bytes), engine.scheduler, handoffs)
            is_connected = self._peers.is_connected
            return PrefillService(prefill, driver, self._index, is_connected, send, wake, self._spawn, time.monotonic)
        decode = DecodeSession(DecodeConfig(block_bytes=engine.block_bytes), engine.scheduler, handoffs)
        return DecodeService(decode, driver, send, wake, time.monotonic)

    def _begin(self, command: StartGeneration | ReserveBlocks | StartPrefill) -> None:
        request_id, grammar = command.request.request_id, command.request.grammar
        if self.role.draining:
            self._answer(Refused(request_id, RefuseReason.DRAINING))
        elif grammar is not None and not self._engine.grammars.has(grammar):
            self._spawn(self._compile_first(command, request_id, grammar))
        else:
            self.role.service.command(command)

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

    def _cancel(self, request_id: str) -> None:
        self.role.service.command(CancelRequest(request_id))
        self._traces.end(request_id, "cancelled")

    def _answer(self, answer: Answer) -> None:
        self._traces.answered(answer)
        self._streams.send(answer)

    async def _planned(self, plan: StepPlan) -> None:
        """Should this step end the process, routers know whose prompts were in it (router/blame.py). What is written is
        read, also when we are gone."""
        told = self._streams.computes(plan.prompts, self._engine.scheduler.load)
        if not told:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(TELL_TIMEOUT_S):
                for stream in told:
                    await stream.outbox.join()

    def _stepped(self, progress: list[Progress], report: StepReport) -> None:
        self._metrics.step_done(report.duration_s, report.prefill_tokens, report.decode_tokens)
        self.say(self.role.service.stepped(progress))
        self._traces.stepped(progress)
        for item in progress:
            if item.ended:
                self._streams.disown(item.request_id)
