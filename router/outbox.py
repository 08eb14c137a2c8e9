"""What workers have sent for open requests and their readers have not taken: one outbox for each, woken in turns.

A chunk that is made and sent for each token costs several times what the token cost to read. So readers are woken
together, and each takes all that is there as one delta. While this process is busy, a turn that took long is followed
by a pause, in which the loop listens to workers; else a reader is woken at once. Measured by bench/router, `tokens`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from core.errors import TandemError
from core.request import FAILURES, TokenDelta

SHORT_TURN_S: Final = 0.001
MAX_TURN_S: Final = 0.02  # one slow client must not stop the others
PAUSE_SHARE: Final = 4.0  # of a turn's time: a fifth of the loop's goes to clients, the rest to workers
MAX_PAUSE_S: Final = 0.05
BUSY_SHARE: Final = 0.5  # of a core's time since the turn before

Item = TokenDelta | TandemError | None  # it ends with None, or with an error


class Turns:
    """Wakes the readers of all outboxes. Of one event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._fresh: dict[Outbox, None] = {}  # to be woken in the next turn
        self._away: set[Outbox] = set()  # woken in this turn, and still writing
        self._begun_s = 0.0
        self._ended_s, self._ended_cpu_s = time.monotonic(), time.process_time()
        self._next: asyncio.Handle | None = None  # begins the next turn, ends this one, or ends the pause

    def fresh(self, outbox: Outbox) -> None:
        """It has something new."""
        self._fresh[outbox] = None
        if self._next is None:
            self._next = self._loop.call_soon(self._begin)

    def back(self, outbox: Outbox) -> None:
        """Its reader wants more, or has left."""
        if outbox in self._away:
            self._away.remove(outbox)
            if not self._away:
                self._end()

    def _begin(self) -> None:
        self._begun_s = time.monotonic()
        woken, self._fresh = self._fresh, {}
        self._away = {outbox for outbox in woken if outbox.wake()}
        self._next = self._loop.call_later(MAX_TURN_S if self._away else 0.0, self._end)

    def _end(self) -> None:
        self._away.clear()
        if self._next is not None:
            self._next.cancel()
        now_s, cpu_s = time.monotonic(), time.process_time()
        pause = pause_s(now_s - self._begun_s, cpu_s - self._ended_cpu_s, now_s - self._ended_s)
        self._ended_s, self._ended_cpu_s = now_s, cpu_s
        self._next = self._loop.call_later(pause, self._rest)

    def _rest(self) -> None:
        self._next = self._loop.call_soon(self._begin) if self._fresh else None


class Outbox:
    """Of one request, which has one reader."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._items: list[Item] = []
        self._reader: asyncio.Future[None] | None = None

    def put(self, item: Item) -> None:
        self._items.append(item)
        if self._reader is not None and not self._reader.done():  # else it says so itself when it wants more
            self._turns.fresh(self)

    def wake(self) -> bool:
        """Let the reader have what was put. False: it has left."""
        if self._reader is None or self._reader.done():
            return False
        self._reader.set_result(None)
        return True

    async def take(self) -> list[Item]:
        """All that is there, at least one, in order; deltas of one choice are joined."""
        self._turns.back(self)
        if self._items:
            self._turns.fresh(self)
        self._reader = asyncio.get_running_loop().create_future()
        await self._reader
        items, self._items = self._items, []
        return joined(items)

    def close(self) -> None:
        """Its reader has left."""
        self._turns.back(self)


def pause_s(turn_s: float, cpu_s: float, since_s: float) -> float:
    """How long there is no turn after one that took `turn_s`, when this process computed for `cpu_s` of the `since_s`
    since the turn before."""
    if turn_s <= SHORT_TURN_S or cpu_s < BUSY_SHARE * since_s:
        return 0.0
    return min(PAUSE_SHARE * turn_s, MAX_PAUSE_S)


def joined(items: Iterable[Item]) -> list[Item]:
    """Deltas of one choice become one, but for those that say more than tokens: a worker's report begins a new one, a
    failure stays alone, so that the tokens before it reach the client."""
    runs: list[list[TokenDelta]] = []
    open_runs: dict[int, list[TokenDelta]] = {}  # by choice
    ends: list[Item] = []
    for item in items:
        if not isinstance(item, TokenDelta):
            ends.append(item)
        elif item.usage is None and item.finish_reason not in FAILURES and item.choice in open_runs:
            open_runs[item.choice].append(item)
        else:
            open_runs[item.choice] = [item]
            runs.append(open_runs[item.choice])
    return [*map(_join, runs), *ends]


def _join(run: list[TokenDelta]) -> TokenDelta:
    if len(run) == 1:
        return run[0]
    last = run[-1]
    return replace(
        run[0],
        token_ids=tuple(token_id for delta in run for token_id in delta.token_ids),
        finish_reason=last.finish_reason,
        matched_stop=last.matched_stop,
        message=last.message,
        logprobs=tuple(item for delta in run for item in delta.logprobs),
    )
