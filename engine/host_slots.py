"""Host memory for cached blocks that the device pool has no room for: slots of one anonymous mapping."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import torch

from engine.cpu.memory import HugeMemory

# What a step's decodes may wait for: 4 ms, 9 ms at p95 (docs/adr/0030-cache-tiers.md: 0.09 and 0.2 ms for 720 KiB).
STEP_COPY_BYTES: Final = 32 << 20


class HostSlots:
    """The HostCopies of a runner's KV pools (ModelRunner.kv_pools), whose parts of a block lie side by side in a slot.

    A copy is done when its call returns, on a GPU too, and touches no block but the one named; so it may be made while
    a step computes with others. Pages become resident when they are first written. On a GPU unrun by us.

    Raises: OSError: there is no room for the mapping.
    """

    def __init__(self, kv_pools: Sequence[torch.Tensor], num_slots: int) -> None:
        # [num_blocks, bytes of a part]; a view, so what is not contiguous is refused
        self._pools = [pool.view(len(pool), -1).view(torch.uint8) for pool in kv_pools]
        self.slot_bytes = sum(pool.shape[1] for pool in self._pools)
        self.copies_per_step = max(1, STEP_COPY_BYTES // self.slot_bytes)
        memory = HugeMemory(num_slots * self.slot_bytes)
        self._slots = memory.tensor((num_slots, self.slot_bytes), torch.uint8)

    def save(self, block: int, slot: int) -> None:
        """Device to host."""
        for part, pool in self._parts(slot):
            part.copy_(pool[block])

    def load(self, slot: int, block: int) -> None:
        """Host to device."""
        for part, pool in self._parts(slot):
            pool[block].copy_(part)

    def bytes_of(self, slot: int) -> memoryview:
        """[slot_bytes], to be read or written."""
        return self._slots[slot].numpy().data

    def _parts(self, slot: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        sizes = [pool.shape[1] for pool in self._pools]
        return zip(self._slots[slot].split(sizes), self._pools, strict=True)
