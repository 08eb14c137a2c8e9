"""Compiles a caller's grammar in a process of its own before any worker sees it (engine/grammar_check.py).

A grammar that ends that process, or keeps it busy too long, is refused, and the next one gets a new process. Tenants
take turns.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Final

from core.errors import BadRequest, Rejected, RejectReason
from core.request import Grammar
from router.admission.policy import ANONYMOUS
from router.front.fair_turn import FairTurn
from telemetry.logs import log_state

logger = logging.getLogger(__name__)

START_TIMEOUT_S: Final = 30.0
CHECK_TIMEOUT_S: Final = 3.0
QUEUE_TIMEOUT_S: Final = 10.0
MAX_REMEMBERED: Final = 256
_PROBE: Final = ["regex", "a"]


class GrammarGate:
    """One checking process at a time, started by `start` or by the first grammar. Every call from one event loop."""

    def __init__(self, model_folder: Path, vocab_size: int) -> None:
        self._arguments = ("-m", "engine.grammar_check", str(model_folder), str(vocab_size))
        self._process: Process | None = None
        self._turn = FairTurn()
        self._known: OrderedDict[Grammar, str | None] = OrderedDict()  # what is wrong with it, if anything

    async def check(self, grammar: Grammar, tenant: str) -> None:
        """Raises: BadRequest: on `grammar`: it does not compile. Rejected: others keep the process busy."""
        if grammar not in self._known:
            await self._learn(grammar, tenant)
        fault = self._known[grammar]
        if fault is not None:
            raise BadRequest("grammar", fault)

    async def _learn(self, grammar: Grammar, tenant: str) -> None:
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(QUEUE_TIMEOUT_S):
                    await stack.enter_async_context(self._turn.of(tenant))
            except TimeoutError as error:
                raise Rejected(RejectReason.QUEUE_TIMEOUT, "too many grammars wait to be compiled") from error
            if grammar not in self._known:  # another one may have asked meanwhile
                self._known[grammar] = await self._compile(grammar)
            if len(self._known) > MAX_REMEMBERED:
                self._known.popitem(last=False)

    async def start(self) -> None:
        """Start the process before its first question, so that no caller waits for it. Need not be called."""
        with suppress(Rejected):
            async with self._turn.of(ANONYMOUS):
                await self._start()

    async def close(self) -> None:
        """End the process. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _compile(self, grammar: Grammar) -> str | None:
        """What is wrong with it. Raises: BadRequest: it takes too long, which the next time it need not."""
        if self._process is None:
            await self._start()
        try:
            return await self._ask([grammar.kind, grammar.source], CHECK_TIMEOUT_S)
        except TimeoutError as error:
            raise BadRequest("grammar", f"is too complex: it did not compile within {CHECK_TIMEOUT_S:g} s") from error
        except (EOFError, ConnectionError):
            return "is too complex: compiling it takes too much memory or nests too deep"

    async def _start(self) -> None:
        """A process that has answered once, so that loading does not count as compiling."""
        self._process = await asyncio.create_subprocess_exec(sys.executable, *self._arguments, stdin=PIPE, stdout=PIPE)
        try:
            await self._ask(_PROBE, START_TIMEOUT_S)
        except (TimeoutError, EOFError, ConnectionError) as error:
            raise Rejected(RejectReason.NO_WORKER, "the process that compiles grammars does not start") from error

    async def _ask(self, question: list[str], timeout_s: float) -> str | None:
        """Raises: TimeoutError; EOFError, ConnectionError: the process has ended. After any error it has."""
        answered = False
        try:
            async with asyncio.timeout(timeout_s):
                fault = await self._exchange(question)
            answered = True
        finally:
            if not answered:  # also when the caller left: this answer must not become the next one's
                log_state(logger, logging.WARNING, state="grammar_check_ended", kind=question[0])
                await self.close()
        return fault

    async def _exchange(self, question: list[str]) -> str | None:
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(question).encode() + b"\n")
        await self._process.stdin.drain()
        line = await self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        fault: str | None = json.loads(line)
        return fault
