"""The one thread that calls NIXL, and the way from asyncio to it and back.

NIXL is never called from the event loop: over CMA a post copies all its bytes before it returns.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

from core.errors import InvariantBroken, TandemError
from kv_transfer.doorbell import Doorbell
from kv_transfer.nixl_engine import NixlEngine
from kv_transfer.nixl_operation import Completion
from kv_transfer.polling import PollingPeriods, PollingRhythm
from telemetry.logs import log_state

logger = logging.getLogger(__name__)

Action = Callable[[NixlEngine, Completion], None]

_COMMANDS_PER_PASS: Final = 8  # so that a burst of pushes does not keep notices waiting

_EXIT_TIMEOUT_S: Final = 2.0


class LoopCompletion:
    """A future of the owner's event loop, settled from the thread. A cancelled future is left alone."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.future: asyncio.Future[Any] = loop.create_future()

    def resolve(self, value: object) -> None:
        self._call(self.future.set_result, value)

    def fail(self, error: Exception) -> None:
        self._call(self.future.set_exception, error)

    def _call(self, settle: Callable[[Any], None], outcome: object) -> None:
        try:
            self._loop.call_soon_threadsafe(self._settle_once, settle, outcome)
        except RuntimeError:
            logger.debug("event loop closed before an operation settled")

    def _settle_once(self, settle: Callable[[Any], None], outcome: object) -> None:
        if not self.future.done():
            settle(outcome)


class NixlThread:
    """Runs an engine until `stop`. An unexpected exception ends the thread, fails everything that waits with
    InvariantBroken and is logged: it never ends silently.

    doorbell: what ends its sleep; closed with it.
    """

    def __init__(self, open_engine: Callable[[], NixlEngine], doorbell: Doorbell, periods: PollingPeriods) -> None:
        self._doorbell = doorbell
        self._periods = periods
        self._commands: queue.SimpleQueue[tuple[Action, LoopCompletion]] = queue.SimpleQueue()
        self._waiting: set[LoopCompletion] = set()
        self._ended: Exception | None = None
        self._stopping = False
        opened: Future[NixlEngine] = Future()
        self._thread = threading.Thread(target=self._run, args=(open_engine, opened), name="kv-transfer", daemon=True)
        self._thread.start()
        self.engine = opened.result()
        # An interpreter that ends while the thread is inside NIXL aborts the process.
        atexit.register(self._stop_at_exit)

    def submit(self, action: Action) -> asyncio.Future[Any]:
        """Run `action` in the thread. The future ends as the action's completion says, or with the error it raised.

        Cancelling the future does not cancel the action.
        """
        completion = LoopCompletion(asyncio.get_running_loop())
        self._waiting.add(completion)
        completion.future.add_done_callback(lambda _: self._waiting.discard(completion))
        self._commands.put((action, completion))
        if self._ended is None:
            self._doorbell.wake()
        else:  # the thread may have ended before it saw the command
            completion.fail(self._ended)
        return completion.future

    async def stop(self) -> None:
        """Free the agent and end the thread."""

        def close(_engine: NixlEngine, done: Completion) -> None:
            self._stopping = True
            done.resolve(None)

        if self._ended is None:
            await self.submit(close)
        await asyncio.to_thread(self._thread.join)
        self._doorbell.close()
        atexit.unregister(self._stop_at_exit)

    def _stop_at_exit(self) -> None:
        self._stopping = True
        self._doorbell.wake()
        self._thread.join(_EXIT_TIMEOUT_S)

    def _run(self, open_engine: Callable[[], NixlEngine], opened: Future[NixlEngine]) -> None:
        try:
            engine = open_engine()
        except BaseException as error:
            opened.set_exception(error)
            return
        opened.set_result(engine)
        try:
            self._serve(engine)
            engine.close()
            self._end(InvariantBroken("transport used after close"))
        except BaseException as error:
            logger.critical("the kv-transfer thread failed", exc_info=True)
            self._end(InvariantBroken(f"the kv-transfer thread failed: {error!r}"))

    def _serve(self, engine: NixlEngine) -> None:
        rhythm, wait_s = PollingRhythm(self._periods), 0.0
        while not self._stopping:
            # What a peer needs while we are active takes less than the doorbell can be told to wait.
            asleep = wait_s > self._periods.active_s
            rung = asleep and self._doorbell.wait(wait_s)
            ran = self._run_commands(engine, 0.0 if asleep else wait_s)
            moved = engine.poll()
            was_unrung = rhythm.unrung
            wait_s = rhythm.passed(
                time.monotonic(), ran=ran, moved=moved, rung=rung, in_flight=engine.num_in_flight > 0
            )
            if rhythm.unrung and not was_unrung:
                reason = "peers' datagrams do not arrive"
                log_state(logger, logging.WARNING, address=self._doorbell.address, state="polling", reason=reason)

    def _run_commands(self, engine: NixlEngine, wait_s: float) -> bool:
        """Run what was submitted; sleep up to `wait_s` for the first. Returns whether there was any."""
        for count in range(_COMMANDS_PER_PASS):
            try:
                action, done = self._next_command(0.0 if count else wait_s)
            except queue.Empty:
                return count > 0
            try:
                action(engine, done)
            except TandemError as error:
                done.fail(error)
        return True

    def _next_command(self, wait_s: float) -> tuple[Action, LoopCompletion]:
        return self._commands.get(timeout=wait_s) if wait_s else self._commands.get_nowait()

    def _end(self, error: Exception) -> None:
        self._ended = error
        for completion in list(self._waiting):
            completion.fail(error)
