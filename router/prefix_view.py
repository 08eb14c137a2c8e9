"""Which worker caches which block, as the workers said: for each request the longest leading run that each one holds.

A worker's events are numbered. After a gap nothing that it said is known to hold, so it is forgotten and asked for a
snapshot. What is missing or wrong here costs a worse choice: a worker looks into its own cache before it uses a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from core.identity import unpack_keys
from core.messages import CacheEvents

ASK_AGAIN_S: Final = 2.0  # a snapshot that was asked for and does not come


@dataclass(slots=True)
class _Told:
    """What one worker said. last: the latest event taken; whole: nothing before it was missed."""

    most_keys: int
    keys: set[int] = field(default_factory=set)
    last: int = 0
    whole: bool = False
    asked_at_s: float = float("-inf")


@dataclass(frozen=True, slots=True)
class Run:
    """The workers that hold the first `num_blocks` blocks of a prompt, as bits by slot."""

    num_blocks: int
    holders: int


class PrefixView:
    """Every worker's cache. A worker has a slot, a small number that is nobody else's meanwhile."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}  # key -> bits of the slots that hold it
        self._told: dict[int, _Told] = {}  # by slot
        self.num_gaps = 0

    @property
    def num_keys(self) -> int:
        """Different blocks known."""
        return len(self._holders)

    def join(self, slot: int, num_blocks: int) -> None:
        """A worker that has `num_blocks` blocks and has not said anything yet."""
        self._told[slot] = _Told(num_blocks)

    def leave(self, slot: int) -> None:
        """It is gone, and its cache with it."""
        self._drop(slot, self._told.pop(slot).keys)

    def hear(self, slot: int, events: CacheEvents | None, now: float) -> bool:
        """Take what a worker says, None: no news. True: something was missed, ask it for a snapshot."""
        told = self._told[slot]
        if events is not None and events.sequence > told.last:  # else taken, or overtaken, which the gap has shown
            self._hear(slot, told, events)
        # One that never said anything of its cache may be of a release that does not know the question either.
        if told.whole or not told.last or now - told.asked_at_s < ASK_AGAIN_S:
            return False
        told.asked_at_s = now
        return True

    def runs(self, keys: Iterable[int]) -> list[Run]:
        """Shortest first; the holders of each are among those of the one before it."""
        found: list[Run] = []
        num_blocks, holders = 0, -1
        get = self._holders.get
        for key in keys:
            still = holders & get(key, 0)
            if still != holders:
                if num_blocks:
                    found.append(Run(num_blocks, holders))
                if not still:
                    return found
                holders = still
            num_blocks += 1
        if num_blocks:
            found.append(Run(num_blocks, holders))
        return found

    def _hear(self, slot: int, told: _Told, events: CacheEvents) -> None:
        if events.reset:
            self._forget(slot, told)
            told.whole = True
        elif told.whole and events.sequence != told.last + 1:
            self.num_gaps += 1
            self._forget(slot, told)
        told.last = events.sequence
        if told.whole:
            self._take(slot, told, events)

    def _take(self, slot: int, told: _Told, events: CacheEvents) -> None:
        """A worker that says more than it can hold is not believed."""
        evicted, stored = unpack_keys(events.evicted), unpack_keys(events.stored)
        self._drop(slot, told.keys.intersection(evicted))
        told.keys.difference_update(evicted)
        if len(told.keys) + len(stored) > told.most_keys and len(told.keys.union(stored)) > told.most_keys:
            self.num_gaps += 1
            self._forget(slot, told)
            return
        told.keys.update(stored)
        bit = 1 << slot
        holders = self._holders
        for key in stored:
            holders[key] = holders.get(key, 0) | bit

    def _forget(self, slot: int, told: _Told) -> None:
        self._drop(slot, told.keys)
        told.keys.clear()
        told.whole = False

    def _drop(self, slot: int, keys: Iterable[int]) -> None:
        others = ~(1 << slot)
        holders = self._holders
        for key in keys:
            still = holders[key] & others
            if still:
                holders[key] = still
            else:
                del holders[key]


def blocks_held(runs: Sequence[Run], slot: int) -> int:
    """How many leading blocks the worker in `slot` holds, of what `runs` found."""
    low, high = 0, len(runs)
    while low < high:
        middle = (low + high) // 2
        if runs[middle].holders >> slot & 1:
            low = middle + 1
        else:
            high = middle
    return runs[low - 1].num_blocks if low else 0
