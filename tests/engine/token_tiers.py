"""Tiers below a TokenMemory: a slot holds the tokens of a block, and the disk is driven by hand."""

from __future__ import annotations

import random

from core.blocks import CacheTier
from engine.cache_tiers import CacheTiers, DiskRead, DiskWrite
from engine.slot_table import SlotTable
from tests.engine.token_memory import TokenMemory

Tokens = dict[int, int]  # by offset in the block


class TokenTiers:
    """The HostCopies of `decisions`, and its disk, of which `io` begins an operation and ends it at another call.

    What the disk was given is remembered, as a checksum is: `rot` changes what it gives back.
    """

    memory: TokenMemory
    copies_per_step = 1000

    def __init__(self, num_host_slots: int, num_disk_slots: int = 0) -> None:
        self.decisions = CacheTiers(self, num_host_slots, num_disk_slots)
        self.host: dict[int, Tokens] = {}
        self.disk: dict[int, Tokens] = {}
        self.given: dict[int, Tokens] = {}
        self.under_way: tuple[DiskRead | DiskWrite, Tokens] | None = None
        self.num_reads = 0
        self.num_copies = 0

    def save(self, block: int, slot: int) -> None:
        self.num_copies += 1
        slots = self.memory.slots
        self.host[slot] = {
            offset: slots[block, offset] for offset in range(self.memory.block_size) if (block, offset) in slots
        }

    def load(self, slot: int, block: int) -> None:
        self.num_copies += 1
        for offset in range(self.memory.block_size):
            self.memory.slots.pop((block, offset), None)
        self.memory.slots.update({(block, offset): token for offset, token in self.host[slot].items()})

    def io(self) -> bool:
        """False: there is nothing to read or write."""
        if self.under_way is None:
            io = self.decisions.next_io()
            if io is None:
                return False
            data = self.host[io.host_slot] if isinstance(io, DiskWrite) else self.disk[io.slot]
            self.under_way = io, dict(data)
            return True
        (io, data), self.under_way = self.under_way, None
        if isinstance(io, DiskWrite):
            self.disk[io.slot], self.given[io.slot] = dict(data), dict(data)
            self.decisions.written(io)
            return True
        self.num_reads += 1
        slot = self.decisions.was_read(io, intact=self.is_intact(io.slot, data))
        if slot is not None:
            self.host[slot] = data
        return True

    def is_intact(self, slot: int, data: Tokens) -> bool:
        return data == self.given[slot]

    def settle(self) -> None:
        """Do all that is to be read or written."""
        while self.io():
            pass

    def rot(self, rng: random.Random) -> None:
        """One of the disk's slots, where it has any, does not hold any more what it was given."""
        if self.disk:
            data = self.disk[rng.choice(sorted(self.disk))]
            data[0] = data.get(0, 0) ^ 1

    def check(self) -> None:
        """Every slot is in one place, exactly."""
        writing = [self.under_way[0].slot] if self.under_way and isinstance(self.under_way[0], DiskWrite) else []
        tables: list[tuple[CacheTier, SlotTable, list[int]]] = [
            (CacheTier.HOST, self.decisions._host, []),
            (CacheTier.DISK, self.decisions._disk, writing),
        ]
        for tier, table, taken in tables:
            slots = sorted([*table._slot_of.values(), *table._free, *taken])
            assert slots == list(range(self.decisions.num_slots[tier])), tier
