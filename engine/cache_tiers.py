"""Where cached blocks go when the device pool gives their place to others: host memory, and behind it a disk.

1. A block that the pool evicts is copied into a host slot at once (`save`), before anybody can write into it.
2. What the host has is written to the disk as soon as that has time for it; a block whose slot is taken before is lost.
3. What a waiting request needs of the disk is read into host slots (`read`); what these hold is copied into fresh
   device blocks as the request is admitted (`load`).
What is copied between two steps is bounded while others run (`allow_copies`): beyond that a block is lost, and who
waits for copies waits for another step (`BlockPool.copy_ahead`).
A host slot keeps its block when the device has it again. One operation of the disk is under way at a time, through
memory of its own (engine/tier_driver.py), so no slot is ever locked, and nothing is read twice for two who want it.

Keys are the hashes of the pool: of identity, tenant, salt and adapter (core/identity.py). What is lost costs a hit.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from core.blocks import CacheTier
from core.errors import InvariantBroken
from core.identity import BlockHash
from engine.slot_table import SlotTable


class HostCopies(Protocol):
    """Copies whole blocks between the device pool and host slots, and returns when they are done.

    copies_per_step: how many, where others wait for it.
    """

    copies_per_step: int

    def save(self, block: int, slot: int) -> None: ...

    def load(self, slot: int, block: int) -> None: ...


class NoCopies:
    """The HostCopies of a worker without tiers: there is no slot to copy to."""

    copies_per_step = 0

    def save(self, block: int, slot: int) -> None:
        raise InvariantBroken(f"block {block} saved to slot {slot} of none")

    def load(self, slot: int, block: int) -> None:
        raise InvariantBroken(f"block {block} loaded from slot {slot} of none")


@dataclass(frozen=True, slots=True)
class DiskRead:
    block_hash: BlockHash
    slot: int


@dataclass(frozen=True, slots=True)
class DiskWrite:
    block_hash: BlockHash
    host_slot: int
    slot: int


class CacheTiers:
    """The tiers below one device pool; with no slots, none.

    on_move: told before a block comes into a tier or leaves one; the pool's. on_work: told when `next_io` may have
    something new; the driver's.
    """

    def __init__(self, copies: HostCopies, num_host_slots: int, num_disk_slots: int = 0) -> None:
        self.num_slots = {CacheTier.HOST: num_host_slots, CacheTier.DISK: num_disk_slots}
        self.num_damaged = 0  # blocks that did not come back from the disk as they were written
        self.on_move: Callable[[BlockHash], None] = lambda _block_hash: None
        self.on_work: Callable[[], None] = lambda: None
        self._copies = copies
        self._host = SlotTable(num_host_slots)
        self._disk = SlotTable(num_disk_slots)
        self._has_disk = num_disk_slots > 0
        self._unwritten: OrderedDict[BlockHash, None] = OrderedDict()  # on the host and not on the disk
        self._reads: dict[BlockHash, int] = {}  # asked for, in order, by number
        self._num_asked = 0
        self._from_disk: set[BlockHash] = set()  # read into the host, and not loaded since
        self._writing: DiskWrite | None = None
        self._unwanted: DiskWrite | None = None  # what is written of a block that was forgotten meanwhile
        self._kept: set[BlockHash] = set()
        self.copies_left = sys.maxsize  # until the next step

    @property
    def copies_per_step(self) -> int:
        return self._copies.copies_per_step

    def allow_copies(self, *, bounded: bool) -> None:
        """Until the next call no more is copied than one step may; or all that is asked for, as nobody waits for it."""
        self.copies_left = self.copies_per_step if bounded else sys.maxsize

    def place(self, block_hash: BlockHash) -> CacheTier | None:
        if block_hash in self._host:
            return CacheTier.HOST
        return CacheTier.DISK if block_hash in self._disk else None

    def hashes(self) -> Iterator[BlockHash]:
        """Of all blocks here; one that two tiers have comes twice."""
        yield from self._host
        yield from self._disk

    def num_blocks(self, tier: CacheTier) -> int:
        return len(self._host if tier is CacheTier.HOST else self._disk)

    # --- the device pool's side ---

    def save(self, block_hash: BlockHash, block: int) -> None:
        """Keep a block that the device pool gives to somebody else, now or soon; unless no more may be copied, beside
        what is about to be loaded."""
        if block_hash in self._host:
            self._host.touch(block_hash)
        else:
            slot = self._take_host_slot() if self.copies_left > len(self._kept) else None
            if slot is None:
                return
            self.copies_left -= 1
            self._copies.save(block, slot)
            self._host.insert(block_hash, slot)
        self._write_later(block_hash)

    def keep(self, hashes: Collection[BlockHash]) -> None:
        """These host blocks stay until the next call: they are about to be loaded."""
        for block_hash in hashes:
            self._host.touch(block_hash)
        self._kept = set(hashes)

    def load(self, block_hash: BlockHash, block: int) -> CacheTier:
        """Copy a host block into a device block that nobody else has. Returns: the tier that it came from."""
        self._kept.discard(block_hash)
        self.copies_left -= 1
        self._copies.load(self._host.slot(block_hash), block)
        if block_hash in self._from_disk:
            self._from_disk.discard(block_hash)
            return CacheTier.DISK
        return CacheTier.HOST

    def forget(self, block_hash: BlockHash) -> None:
        """What it holds is not to be relied on: no tier has it from now on, and no operation under way brings it."""
        if block_hash in self._host:
            self._drop_from_host(block_hash)
        if block_hash in self._disk:
            self.on_move(block_hash)
            self._disk.remove(block_hash)
        self._reads.pop(block_hash, None)
        if self._writing is not None and self._writing.block_hash == block_hash:
            self._unwanted = self._writing

    def read(self, hashes: Iterable[BlockHash]) -> int:
        """Have those of a run that only the disk has read into the host, the first ones first, as far as half of its
        slots go; what the host has of it does not make room for them. Returns: a number for `is_read`."""
        room = max(1, self.num_slots[CacheTier.HOST] // 2) - len(self._reads)
        last = 0
        for block_hash in hashes:
            if block_hash in self._host:
                self._host.touch(block_hash)
            elif block_hash in self._disk:
                if block_hash not in self._reads:
                    if room <= 0:
                        break
                    room -= 1
                    self._num_asked += 1
                    self._reads[block_hash] = self._num_asked
                last = max(last, self._reads[block_hash])
        if last:
            self.on_work()
        return last

    def is_read(self, number: int) -> bool:
        """What `read` numbered so has been read, or cannot be."""
        return not self._reads or number < next(iter(self._reads.values()))

    # --- the disk's side ---

    def give_up_reads(self) -> None:
        """Who waits for the disk has waited long enough; what was not read is computed."""
        self._reads.clear()

    def next_io(self) -> DiskRead | DiskWrite | None:
        """What to read or write now; tell of its end before the next call."""
        for block_hash in self._reads:
            return DiskRead(block_hash, self._disk.slot(block_hash))
        if not self._unwritten:
            return None
        block_hash, _nothing = self._unwritten.popitem(last=False)
        if not self._disk.num_free:
            oldest = self._disk.oldest
            self.on_move(oldest)
            self._disk.remove(oldest)
        self._writing = DiskWrite(block_hash, self._host.slot(block_hash), self._disk.take())
        return self._writing

    def written(self, write: DiskWrite) -> None:
        self._writing = None
        if write is self._unwanted:
            self._disk.give_back(write.slot)
            return
        self.on_move(write.block_hash)
        self._unwritten.pop(write.block_hash, None)  # evicted from the device a second time meanwhile
        self._disk.insert(write.block_hash, write.slot)

    def was_read(self, read: DiskRead, *, intact: bool) -> int | None:
        """Returns: the host slot to copy it into, now; None when there is none, or the block is damaged
        or forgotten."""
        if self._reads.pop(read.block_hash, None) is None:
            return None
        self.on_move(read.block_hash)
        if not intact:
            self.num_damaged += 1
            self._disk.remove(read.block_hash)
            return None
        self._disk.touch(read.block_hash)
        slot = None if read.block_hash in self._host else self._take_host_slot()
        if slot is not None:
            self._host.insert(read.block_hash, slot)
            self._from_disk.add(read.block_hash)
        return slot

    def lose_disk(self) -> None:
        """It failed: nothing is read from it or written to it any more."""
        for block_hash in list(self._disk):
            self.on_move(block_hash)
            self._disk.remove(block_hash)
        self._has_disk = False
        self._writing = None
        self._reads.clear()
        self._unwritten.clear()

    def check(self) -> None:
        """Raise InvariantBroken unless every slot is in exactly one place."""
        self._host.check()
        if self._has_disk:
            self._disk.check(() if self._writing is None else (self._writing.slot,))

    def _take_host_slot(self) -> int | None:
        if not self._host.num_free:
            if not len(self._host) or self._host.oldest in self._kept:
                return None
            self._drop_from_host(self._host.oldest)
        return self._host.take()

    def _drop_from_host(self, block_hash: BlockHash) -> None:
        self.on_move(block_hash)
        self._host.remove(block_hash)
        self._unwritten.pop(block_hash, None)
        self._from_disk.discard(block_hash)

    def _write_later(self, block_hash: BlockHash) -> None:
        if self._has_disk and block_hash not in self._disk:
            self._unwritten[block_hash] = None
            self._unwritten.move_to_end(block_hash)
            self.on_work()
