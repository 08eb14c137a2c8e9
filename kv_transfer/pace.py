"""How fast pushes to each peer have been, and so how long the next may take. Without clock or socket."""

from __future__ import annotations

from typing import Final

from core.membership import WorkerRef

NEW_SHARE: Final = 0.25  # of the latest push in the mean
PATIENCE: Final = 10.0  # a push may take so many times what the mean says: cores and links are shared
# No path is slower than that for long. A push that took seconds met a frozen process or a loaded machine, and says
# nothing of the next one: taken at its word, a small one made a large one's bound minutes.
LEAST_BYTES_PER_S: Final = 10e6


class TransferPace:
    """Mean seconds a block by peer, exponentially weighted; a probe at connect begins it."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._most_block_s = block_bytes / LEAST_BYTES_PER_S
        self._block_s: dict[WorkerRef, float] = {}

    def probed(self, peer: WorkerRef, gbps: float) -> None:
        """What the connection's probe measured, in gigabytes per second; 0: nothing."""
        if gbps > 0:
            self._block_s.setdefault(peer, min(self._block_bytes / gbps / 1e9, self._most_block_s))

    def pushed(self, peer: WorkerRef, num_blocks: int, duration_s: float) -> None:
        """A push of `num_blocks` arrived, `duration_s` after it was posted."""
        if num_blocks:
            block_s = min(duration_s / num_blocks, self._most_block_s)
            mean_s = self._block_s.get(peer, block_s)
            self._block_s[peer] = mean_s + NEW_SHARE * (block_s - mean_s)

    def bound_s(self, peer: WorkerRef, num_blocks: int) -> float:
        """The longest that pushing `num_blocks` to a peer should take; 0 when nothing is known of it."""
        return PATIENCE * num_blocks * self._block_s.get(peer, 0.0)

    def forget(self, peer: WorkerRef) -> None:
        self._block_s.pop(peer, None)
