"""Which cached block is in which slot of one tier, the least recently used first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator

from core.errors import InvariantBroken
from core.identity import BlockHash


class SlotTable:
    """Slots in [0, num_slots): free, holding a block, or taken by somebody who will say what it holds."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._slot_of: OrderedDict[BlockHash, int] = OrderedDict()
        self._free = list(range(num_slots - 1, -1, -1))

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._slot_of

    def __iter__(self) -> Iterator[BlockHash]:
        return iter(self._slot_of)

    def __len__(self) -> int:
        return len(self._slot_of)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def oldest(self) -> BlockHash:
        return next(iter(self._slot_of))

    def slot(self, block_hash: BlockHash) -> int:
        return self._slot_of[block_hash]

    def touch(self, block_hash: BlockHash) -> None:
        self._slot_of.move_to_end(block_hash)

    def take(self) -> int:
        """A free slot, which is the caller's until `insert` or `give_back`."""
        return self._free.pop()

    def insert(self, block_hash: BlockHash, slot: int) -> None:
        self._slot_of[block_hash] = slot

    def give_back(self, slot: int) -> None:
        """What was taken holds nothing after all."""
        self._free.append(slot)

    def remove(self, block_hash: BlockHash) -> None:
        self.give_back(self._slot_of.pop(block_hash))

    def check(self, taken: Collection[int] = ()) -> None:
        """Raise InvariantBroken unless every slot is somewhere."""
        num_known = len(self._slot_of) + len(self._free) + len(taken)
        if num_known != self._num_slots:
            raise InvariantBroken(f"{num_known} of {self._num_slots} slots are somewhere")
