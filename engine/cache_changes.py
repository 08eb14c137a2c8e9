"""Which cached blocks are elsewhere than at the last look, for those who are told of a worker's cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from core.blocks import CacheTier
from core.identity import BlockHash


@dataclass(frozen=True, slots=True)
class CacheChanges:
    """Blocks that moved; one that came and went in between is none of them.

    stored: on the device now. evicted: no longer; of these, host and disk are now there.
    """

    stored: tuple[BlockHash, ...]
    evicted: tuple[BlockHash, ...]
    host: tuple[BlockHash, ...] = ()
    disk: tuple[BlockHash, ...] = ()


class CacheMoves:
    """place: where a block is now; None: nowhere."""

    def __init__(self, place: Callable[[BlockHash], CacheTier | None]) -> None:
        self._place = place
        self._was: dict[BlockHash, CacheTier | None] = {}  # at the last look, of those that may have moved since

    def note(self, block_hash: BlockHash) -> None:
        """It is about to move."""
        self._was.setdefault(block_hash, self._place(block_hash))

    @property
    def any(self) -> bool:
        """Something has moved since `take`."""
        return any(self._place(block_hash) is not before for block_hash, before in self._was.items())

    def take(self) -> CacheChanges:
        """What moved since the last call."""
        now: dict[CacheTier | None, list[BlockHash]] = {place: [] for place in (*CacheTier, None)}
        for block_hash, before in self._was.items():
            if (place := self._place(block_hash)) is not before:
                now[place].append(block_hash)
        self._was = {}
        host, disk = now[CacheTier.HOST], now[CacheTier.DISK]
        return CacheChanges(tuple(now[CacheTier.DEVICE]), (*now[None], *host, *disk), tuple(host), tuple(disk))
