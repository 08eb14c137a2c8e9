"""What one router is told of a worker's cache: numbered events, and at first a snapshot in bounded pieces.

A piece of the snapshot is looked at again when it goes out, so that what was evicted meanwhile is not in it, and what
is evicted later follows as an event. So events may go out while the snapshot does, and both are stored blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from core.identity import BlockHash, pack_keys
from core.messages import CacheEvents
from engine.block_pool import BlockPool

PIECE_BLOCKS: Final = 8192  # of a snapshot in one message: 64 KiB


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

    def next(self, stored: bytes, evicted: bytes, pool: BlockPool) -> CacheEvents | None:
        """The next event, or None without news. `stored`, `evicted`: keys of all changes of `pool` since the last."""
        reset = self._snapshot is None
        if self._snapshot is None:
            self._snapshot, self._num_sent = pool.cached_hashes(), 0
            stored = evicted = b""  # the snapshot holds what came of them
        elif not (stored or evicted or self.behind):
            return None
        piece = self._snapshot[self._num_sent : self._num_sent + PIECE_BLOCKS]
        self._num_sent += len(piece)
        if not self.behind:
            self._snapshot, self._num_sent = (), 0
        stored += pack_keys(block_hash for block_hash in piece if pool.is_cached(block_hash))
        self._sequence += 1
        return CacheEvents(self._sequence, stored, evicted, reset)
