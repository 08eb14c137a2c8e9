"""What one router is told of a worker's cache: numbered events, and at first a snapshot in bounded pieces.

A piece of the snapshot is looked at again when it goes out, so that what was evicted meanwhile is not in it, and what
is evicted later follows as an event. So events may go out while the snapshot does, and both are stored blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from core.blocks import CacheTier
from core.identity import BlockHash, pack_keys
from core.messages import CacheEvents
from engine.block_pool import BlockPool
from engine.cache_changes import CacheChanges

PIECE_BLOCKS: Final = 8192  # of a snapshot in one message: 64 KiB
NO_NEWS: Final = CacheEvents(0, b"", b"")


def packed(changes: CacheChanges) -> CacheEvents:
    """What each stream is told of them, under its own number."""
    return CacheEvents(
        sequence=0,
        stored=pack_keys(changes.stored),
        evicted=pack_keys(changes.evicted),
        host=pack_keys(changes.host),
        disk=pack_keys(changes.disk),
    )


class CacheFeed:
    """One stream's numbers, and how far its snapshot is."""

    def __init__(self) -> None:
        self._sequence = 0
        self._snapshot: Sequence[BlockHash] | None = None  # None: to be taken
        self._num_sent = 0

    @property
    def behind(self) -> bool:
        """A part of the snapshot has not gone out."""
        return self._snapshot is None or self._num_sent < len(self._snapshot)

    def begin_again(self) -> None:
        """The router has missed something, or will."""
        self._snapshot = None

    def next(self, news: CacheEvents, pool: BlockPool) -> CacheEvents | None:
        """The next event, or None without news. `news`: all changes of `pool` since the last (`packed`)."""
        reset = self._snapshot is None
        if self._snapshot is None:
            self._snapshot, self._num_sent = pool.all_hashes(), 0
            news = NO_NEWS  # the snapshot holds what came of them
        elif news == NO_NEWS and not self.behind:
            return None
        piece = self._snapshot[self._num_sent : self._num_sent + PIECE_BLOCKS]
        self._num_sent += len(piece)
        if not self.behind:
            self._snapshot, self._num_sent = (), 0
        places = [pool.place(block_hash) for block_hash in piece]

        def keys(tier: CacheTier) -> bytes:
            return pack_keys(block_hash for block_hash, place in zip(piece, places, strict=True) if place is tier)

        self._sequence += 1
        return replace(
            news,
            sequence=self._sequence,
            reset=reset,
            stored=news.stored + keys(CacheTier.DEVICE),
            host=news.host + keys(CacheTier.HOST),
            disk=news.disk + keys(CacheTier.DISK),
        )
