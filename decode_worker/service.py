"""Drives a decode worker's session: commands in, answers out, hand-offs over the driver.

Mirror image: prefill_worker/service.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import assert_never

from core.messages import (
    Answer,
    CancelRequest,
    Refused,
    RefuseReason,
    ReserveBlocks,
    Reserved,
    StartGeneration,
    StartPrefill,
)
from core.request import TokenDelta
from decode_worker.session import DecodeSession, Effect
from engine.step import Progress
from kv_transfer.driver import HandoffDriver
from kv_transfer.effects import SourceEnded, TargetFailed, TargetLanded


class DecodeService:
    """The decode role of one worker. Every call comes from the worker's event loop."""

    def __init__(
        self,
        session: DecodeSession,
        driver: HandoffDriver,
        send: Callable[[Answer], None],
        wake_engine: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._session = session
        self._driver = driver
        self._send = send
        self._wake_engine = wake_engine
        self._clock = clock

    def __len__(self) -> int:
        """Requests that the scheduler does not hold."""
        return len(self._session)

    def unbegun(self) -> list[str]:
        """Requests of which nothing is computed."""
        return self._session.unbegun()

    def command(self, command: StartGeneration | ReserveBlocks | StartPrefill | CancelRequest) -> None:
        """One request-level command of a router."""
        now = self._clock()
        match command:
            case StartGeneration(request):
                self._perform(self._session.start(request))
            case ReserveBlocks(request, handoff_id, source):
                self._perform(self._session.reserve(request, handoff_id, source, now))
            case CancelRequest(request_id):
                self._perform(self._session.cancel(request_id, now))
            case StartPrefill(request):
                self._send(Refused(request.request_id, RefuseReason.WRONG_ROLE, "this is a decode worker"))
            case _:
                assert_never(command)

    def stepped(self, progress: list[Progress]) -> list[TokenDelta]:
        """What one engine step did; returns the tokens to send."""
        deltas = self._session.progressed(progress)
        self._perform(self._session.serve_waiting(self._clock()))
        return deltas

    def handoff_ended(self, outcome: SourceEnded | TargetLanded | TargetFailed) -> None:
        match outcome:
            case TargetLanded():
                self._perform(self._session.landed(outcome))
            case TargetFailed():
                self._perform(self._session.failed(outcome))
            case SourceEnded():
                pass  # a prefix pushed to a peer: nobody here waits for it
            case _:
                assert_never(outcome)

    def tick(self) -> None:
        """Let waits end; call it a few times a second."""
        self._perform(self._session.tick(self._clock()))

    def _perform(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Reserved() | Refused():
                    self._send(effect)
                case _:
                    self._driver.perform([effect])
        self._wake_engine()
