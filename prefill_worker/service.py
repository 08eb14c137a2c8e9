"""Drives a prefill worker's session: commands in, answers out, hand-offs over the driver.

Mirror image: decode_worker/service.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import assert_never

from core.membership import WorkerRef
from core.messages import (
    Answer,
    CancelRequest,
    Refused,
    RefuseReason,
    ReserveBlocks,
    StartGeneration,
    StartPrefill,
)
from core.request import TokenDelta
from engine.step import Progress
from kv_transfer.driver import HandoffDriver
from kv_transfer.effects import SourceEnded, TargetFailed, TargetLanded
from kv_transfer.prefix_index import PrefixIndex
from prefill_worker.session import Effect, LookUpPrefix, PrefillSession
from telemetry.tasks import Spawn


class PrefillService:
    """The prefill role of one worker. Every call comes from the worker's event loop.

    is_connected: whether a holder can be asked to push. spawn: runs a task and watches over it.
    """

    def __init__(
        self,
        session: PrefillSession,
        driver: HandoffDriver,
        index: PrefixIndex,
        is_connected: Callable[[WorkerRef], bool],
        send: Callable[[Answer], None],
        wake_engine: Callable[[], None],
        spawn: Spawn,
        clock: Callable[[], float],
    ) -> None:
        self._session = session
        self._driver = driver
        self._index = index
        self._is_connected = is_connected
        self._send = send
        self._wake_engine = wake_engine
        self._spawn = spawn
        self._clock = clock

    def __len__(self) -> int:
        """Requests that the scheduler does not hold yet."""
        return len(self._session)

    def unbegun(self) -> list[str]:
        """Requests of which nothing is computed."""
        return self._session.unbegun()

    def command(self, command: StartGeneration | ReserveBlocks | StartPrefill | CancelRequest) -> None:
        """One request-level command of a router."""
        now = self._clock()
        match command:
            case StartPrefill(request, ticket):
                self._perform(self._session.start(request, ticket, now))
            case CancelRequest(request_id):
                self._perform(self._session.cancel(request_id, now))
            case StartGeneration(request) | ReserveBlocks(request):
                self._send(Refused(request.request_id, RefuseReason.WRONG_ROLE, "this is a prefill worker"))
            case _:
                assert_never(command)

    def stepped(self, progress: list[Progress]) -> list[TokenDelta]:
        """What one engine step did; returns the tokens to send."""
        deltas, effects = self._session.progressed(progress, self._clock())
        self._perform(effects)
        return deltas

    def handoff_ended(self, outcome: SourceEnded | TargetLanded | TargetFailed) -> None:
        match outcome:
            case TargetLanded():
                self._perform(self._session.landed(outcome))
            case TargetFailed():
                self._perform(self._session.failed(outcome))
            case SourceEnded():
                self._perform(self._session.source_ended(outcome, self._clock()))
            case _:
                assert_never(outcome)

    def tick(self) -> None:
        """Let waits end; call it a few times a second."""
        self._perform(self._session.tick(self._clock()))

    def _perform(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Refused():
                    self._send(effect)
                case LookUpPrefix():
                    self._spawn(self._look_up(effect))
                case _:
                    self._driver.perform([effect])
        self._wake_engine()

    async def _look_up(self, question: LookUpPrefix) -> None:
        """The index bounds its own time and answers "nobody" when it is slow or away."""
        hit = await self._index.lookup(question.block_hashes)
        holder = next((ref for ref in hit.holders if self._is_connected(ref)), None)
        now = self._clock()
        self._perform(self._session.prefix_found(question.request_id, hit.num_blocks, holder, now))
