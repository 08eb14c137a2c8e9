"""Which worker caches which block, as the workers said: for each request the longest leading run that each one holds.

A worker's events are numbered. After a gap nothing that it said is known to hold, so it is forgotten and asked for a
snapshot. What is missing or wrong here costs a worse choice: a worker looks into its own cache before it uses a block.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from core.identity import unpack_keys
from core.messages import CacheEvents

ASK_AGAIN_S: Final = 2.0  # a snapshot that was asked for and does not come


@dataclass(slots=True)
class _Told:
    """What one worker said. below: of the keys, those that are not on its device. last: the latest event taken; whole:
    nothing before it was missed."""

    most_keys: int
    keys: set[int] = field(default_factory=set)
    below: set[int] = field(default_factory=set)
    last: int = 0
    whole: bool = False
    asked_at_s: float = float("-inf")


@dataclass(frozen=True, slots=True)
class Run:
    """The workers that hold the first `num_blocks` blocks of a prompt, as bits by slot; and of these, those that have
    the blocks since the run before this one in host memory, or on a disk, and not on the device."""

    num_blocks: int
    holders: int
    host: int = 0
    disk: int = 0


class PrefixView:
    """Every worker's cache. A worker has a slot, a small number that is nobody else's meanwhile."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}  # key -> bits of the slots that hold it, in any tier
        self._host: dict[int, int] = {}  # of these, those that have it there
        self._disk: dict[int, int] = {}
        self._told: dict[int, _Told] = {}  # by slot
        self.num_gaps = 0

    @property
    def num_keys(self) -> int:
        """Different blocks known."""
        return len(self._holders)

    @property
    def tiered(self) -> bool:
        """Some worker has a block elsewhere than on its device."""
        return bool(self._host or self._disk)

    def join(self, slot: int, num_blocks: int) -> None:
        """A worker that can hold `num_blocks` blocks, in all tiers, and has not said anything yet."""
        self._told[slot] = _Told(num_blocks)

    def leave(self, slot: int) -> None:
        """It is gone, and its cache with it."""
        self._forget(slot, self._told[slot])
        del self._told[slot]

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
        return self._tiered_runs(keys) if self.tiered else self._device_runs(keys)

    def _device_runs(self, keys: Iterable[int]) -> list[Run]:
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

    def _tiered_runs(self, keys: Iterable[int]) -> list[Run]:
        """As above, where a run ends with each change of a tier too."""
        found: list[Run] = []
        num_blocks, run = 0, (-1, 0, 0)
        holders, on_host, on_disk = self._holders.get, self._host.get, self._disk.get
        for key in keys:
            still = run[0] & holders(key, 0)
            now = (still, still & on_host(key, 0), still & on_disk(key, 0))
            if now != run:
                if num_blocks:
                    found.append(Run(num_blocks, *run))
                if not still:
                    return found
                run = now
            num_blocks += 1
        if num_blocks:
            found.append(Run(num_blocks, *run))
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
        on_host, on_disk = unpack_keys(events.host), unpack_keys(events.disk)
        self._drop(slot, told, told.keys.intersection(evicted))
        self._lift(slot, told, told.below.intersection((*stored, *on_host, *on_disk)))
        known = (*stored, *on_host, *on_disk)
        if len(told.keys) + len(known) > told.most_keys and len(told.keys.union(known)) > told.most_keys:
            self.num_gaps += 1
            self._forget(slot, told)
            return
        told.keys.update(known)
        told.below.update(on_host, on_disk)
        for holders, keys in ((self._holders, known), (self._host, on_host), (self._disk, on_disk)):
            _add(holders, 1 << slot, keys)

    def _forget(self, slot: int, told: _Told) -> None:
        self._drop(slot, told, list(told.keys))
        told.whole = False

    def _drop(self, slot: int, told: _Told, keys: Collection[int]) -> None:
        """Of its keys."""
        self._lift(slot, told, told.below.intersection(keys))
        told.keys.difference_update(keys)
        _take_away(self._holders, 1 << slot, keys)

    def _lift(self, slot: int, told: _Told, keys: Collection[int]) -> None:
        """These of its keys are in no tier below the device any more."""
        told.below.difference_update(keys)
        for holders in (self._host, self._disk):
            _take_away(holders, 1 << slot, keys)


def _add(holders: dict[int, int], bit: int, keys: Iterable[int]) -> None:
    for key in keys:
        holders[key] = holders.get(key, 0) | bit


def _take_away(holders: dict[int, int], bit: int, keys: Iterable[int]) -> None:
    """Keys that nobody holds are no keys any more."""
    for key in keys:
        still = holders.get(key, 0) & ~bit
        if still:
            holders[key] = still
        else:
            holders.pop(key, None)


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


def blocks_below(runs: Sequence[Run], slot: int) -> tuple[int, int]:
    """Of the leading blocks that the worker in `slot` holds, how many it has in host memory, and on a disk."""
    on_host = on_disk = before = 0
    for run in runs:
        if not run.holders >> slot & 1:
            break
        num_blocks = run.num_blocks - before
        before = run.num_blocks
        if run.host >> slot & 1:
            on_host += num_blocks
        elif run.disk >> slot & 1:
            on_disk += num_blocks
    return on_host, on_disk


def longest_on_device(runs: Sequence[Run], *, tiered: bool = True) -> Run:
    """The longest run that somebody has whole on its device, from where it can be pushed; no blocks if nobody has."""
    if not tiered:
        return runs[-1] if runs else Run(0, 0)
    longest, holders = Run(0, 0), -1
    for run in runs:
        holders &= run.holders & ~(run.host | run.disk)
        if not holders:
            break
        longest = Run(run.num_blocks, holders)
    return longest
