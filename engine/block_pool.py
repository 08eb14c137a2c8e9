"""Which KV block belongs to whom: references, the per-worker prefix cache, and quarantine.

Every block is in exactly one of three places:
- free: nobody refers to it; it may keep the hash of what it holds and is then a cached block that can be revived
  until it is taken for something else, least recently used first;
- used: one or more references;
- quarantined: a write from a peer may still come; nobody may have it.

free + used + quarantined = total, always (`check`).

A cached block that is taken for something else goes to the tiers below (engine/cache_tiers.py), where there are any,
and comes back into a fresh block when it is hit there. Where that is more than may be copied at once, the same is done
ahead, to blocks that stay free (`copy_ahead`).
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import islice

from core.blocks import CacheTier
from core.errors import InvariantBroken
from core.identity import BlockHash
from engine.cache_changes import CacheMoves
from engine.cache_tiers import CacheTiers, NoCopies


class BlockPool:
    """Hands out block ids in [0, num_blocks). Touches no memory: the KV bytes are the runner's, which `tiers` copies.

    moves: of its blocks between tiers. hit_blocks: found by `acquire`, in all, by the tier that they were in.
    """

    def __init__(self, num_blocks: int, tiers: CacheTiers | None = None) -> None:
        self.num_blocks = num_blocks
        self.tiers = tiers or CacheTiers(NoCopies(), 0)
        self.moves = CacheMoves(self.place)
        self.tiers.on_move = self.moves.note
        self.hit_blocks = dict.fromkeys(CacheTier, 0)
        self._references = [0] * num_blocks
        self._hash_of: list[BlockHash | None] = [None] * num_blocks
        self._cached: dict[BlockHash, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._quarantined: set[int] = set()
        self._ahead: dict[BlockHash, CacheTier] = {}  # brought here and not hit since, and where from

    @property
    def num_free(self) -> int:
        """Free blocks, cached ones included: what `allocate` can give."""
        return len(self._free)

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantined)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free) - len(self._quarantined)

    def num_references(self, block: int) -> int:
        return self._references[block]

    def place(self, block_hash: BlockHash) -> CacheTier | None:
        """Where it is cached; None: nowhere here."""
        return CacheTier.DEVICE if block_hash in self._cached else self.tiers.place(block_hash)

    def match(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Blocks of the longest leading run of `hashes` held here, on the device. Takes no reference."""
        found = []
        for block_hash in hashes:
            block = self._cached.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def num_cached(self, hashes: Iterable[BlockHash]) -> int:
        """Blocks of the longest leading run of `hashes` that any tier holds."""
        return sum(1 for _place in self._places(hashes))

    def fetch(self, hashes: Iterable[BlockHash]) -> int:
        """Have read from the disk what only that holds of the leading run. Returns: a number for `is_fetched`."""
        return self.tiers.read([h for h, place in self._places(hashes) if place is not CacheTier.DEVICE])

    def is_fetched(self, number: int) -> bool:
        """What `fetch` numbered so can be acquired, as far as it is still there."""
        return self.tiers.is_read(number)

    def acquire(
        self, hashes: Sequence[BlockHash], num_blocks: int, keep_free: int = 0
    ) -> tuple[list[int], list[int]] | None:
        """Take a reference on every cached block of the leading run of `hashes`, and fresh blocks up to `num_blocks`.

        Blocks of the run that only the host has are copied into fresh ones, and are hits too, as far as may be copied
        now. At least `keep_free` blocks stay free.

        Returns: (hit blocks, fresh blocks), or None, with nothing changed, when there is not enough room.
        """
        run = self._run(hashes[:num_blocks], self.tiers.copies_left)
        here = [block for block in run if block is not None]
        if not self._has_room(here, num_blocks, keep_free):
            return None
        self.hold(here)
        absent = []
        for block_hash, block in zip(hashes, run, strict=False):
            if block is None:
                absent.append(block_hash)
            else:
                self.hit_blocks[self._ahead.pop(block_hash, CacheTier.DEVICE)] += 1
        self.tiers.keep(absent)
        fresh = self._take(num_blocks - len(here))
        for block_hash, block in zip(absent, fresh, strict=False):
            self.hit_blocks[self.tiers.load(block_hash, block)] += 1
            self.cache(block, block_hash)
        self.tiers.keep(())
        return [self._cached[block_hash] for block_hash in hashes[: len(run)]], fresh[len(absent) :]

    def copy_ahead(self, hashes: Sequence[BlockHash], num_blocks: int, keep_free: int) -> int:
        """What `acquire` of the same would copy, as far as may be copied now, where that is not all of it.

        Returns: how many copies that leaves to later steps; 0 too where there is no room for it.
        """
        run = self._run(hashes[:num_blocks])
        here = [block for block in run if block is not None]
        if not self._has_room(here, num_blocks, keep_free):
            return 0
        absent = [block_hash for block_hash, block in zip(hashes, run, strict=False) if block is None]
        unsaved = self._unsaved(num_blocks - len(here), set(here))
        num_missing = len(unsaved) + len(absent)
        if num_missing <= self.tiers.copies_left:
            return 0
        for block in reversed(here):  # not for what follows
            if block in self._free:
                self._free.move_to_end(block)
        self.tiers.keep(absent)
        self.tiers.keep(())
        left = self.tiers.copies_left
        for block_hash, block in unsaved:
            self.tiers.save(block_hash, block)
        for block_hash in absent:
            if not self._bring(block_hash):
                break
        return num_missing - left + self.tiers.copies_left

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Fresh blocks with one reference each, or None, with nothing changed, when there are too few."""
        return None if num_blocks > self.num_free else self._take(num_blocks)

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block; a free cached block is revived."""
        for block in blocks:
            if block in self._quarantined:
                raise InvariantBroken(f"block {block} is quarantined and cannot be held")
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference from each block of one table; the table's tail becomes evictable before its head."""
        for block in reversed(blocks):
            self._drop_reference(block)
            if self._references[block] == 0:
                self._free[block] = None
                if self._hash_of[block] is None:
                    self._free.move_to_end(block, last=False)  # holds nothing findable: take it first

    def cache(self, block: int, block_hash: BlockHash) -> None:
        """Make a used, fully computed block findable. The first block of a hash stays the one that is found."""
        if self._references[block] == 0:
            raise InvariantBroken(f"block {block} is not used and cannot be cached")
        if block_hash in self._cached or self._hash_of[block] is not None:
            return
        self.moves.note(block_hash)
        self._cached[block_hash] = block
        self._hash_of[block] = block_hash

    def forget(self, blocks: Iterable[int]) -> None:
        """Make blocks unfindable, whoever else holds them: what they hold is not to be relied on."""
        for block in blocks:
            block_hash = self._hash_of[block]
            if block_hash is not None:
                self._uncache(block, block_hash)
                self.tiers.forget(block_hash)

    def quarantine(self, blocks: Iterable[int]) -> None:
        """Lock blocks of which one reference is left and that hold nothing findable: a write may still come."""
        for block in blocks:
            if self._hash_of[block] is not None:
                raise InvariantBroken(f"block {block} is cached and cannot be a transfer's target")
            self._drop_reference(block)
            if self._references[block] != 0:
                raise InvariantBroken(f"block {block} is shared and cannot be quarantined")
            self._quarantined.add(block)

    def end_quarantine(self, blocks: Iterable[int]) -> None:
        """Free quarantined blocks: no write can come any more."""
        for block in blocks:
            if block not in self._quarantined:
                raise InvariantBroken(f"block {block} is not quarantined")
            self._quarantined.discard(block)
            self._free[block] = None
            self._free.move_to_end(block, last=False)

    def cached_hashes(self) -> tuple[BlockHash, ...]:
        """Every hash that is findable on the device now."""
        return tuple(self._cached)

    def all_hashes(self) -> tuple[BlockHash, ...]:
        """Every hash that any tier has now."""
        return tuple(dict.fromkeys([*self._cached, *self.tiers.hashes()]))

    def num_cached_by_tier(self) -> dict[CacheTier, int]:
        """Blocks that can be found, in each tier that there is."""
        below = {tier: self.tiers.num_blocks(tier) for tier, slots in self.tiers.num_slots.items() if slots}
        return {CacheTier.DEVICE: len(self._cached), **below}

    def check(self) -> None:
        """Raise InvariantBroken unless every block is in exactly one place."""
        used = {block for block, count in enumerate(self._references) if count > 0}
        places = len(self._free) + len(used) + len(self._quarantined)
        together = used | self._free.keys() | self._quarantined
        if places != self.num_blocks or len(together) != self.num_blocks:
            raise InvariantBroken(
                f"{len(self._free)} free + {len(used)} used + {len(self._quarantined)} quarantined "
                f"!= {self.num_blocks} blocks"
            )
        self.tiers.check()

    def _run(self, hashes: Iterable[BlockHash], most_absent: int = sys.maxsize) -> list[int | None]:
        """Blocks of the longest leading run that can be had at once; None for those that only the host has, at most
        `most_absent`."""
        found: list[int | None] = []
        for block_hash in hashes:
            block = self._cached.get(block_hash)
            if block is None:
                if not most_absent or self.tiers.place(block_hash) is not CacheTier.HOST:
                    break
                most_absent -= 1
            found.append(block)
        return found

    def _has_room(self, here: Iterable[int], num_blocks: int, keep_free: int) -> bool:
        """For `num_blocks`, of which these are here."""
        num_held = sum(1 for block in here if self._references[block] > 0)
        return num_blocks - num_held + keep_free <= self.num_free

    def _unsaved(self, num_blocks: int, spared: Container[int]) -> list[tuple[BlockHash, int]]:
        """What would have to be copied to the host for so many fresh blocks, the first one first."""
        if not self.tiers.num_slots[CacheTier.HOST]:
            return []
        next_ones = islice((block for block in self._free if block not in spared), num_blocks)
        held = ((self._hash_of[block], block) for block in next_ones)
        return [(it, block) for it, block in held if it is not None and self.tiers.place(it) is not CacheTier.HOST]

    def _bring(self, block_hash: BlockHash) -> bool:
        """Copy a host block into a free one, which stays free. False: that is more than may be copied now."""
        num_copies = 1 + len(self._unsaved(1, ()))
        if num_copies > self.tiers.copies_left or self.tiers.place(block_hash) is not CacheTier.HOST:
            return False
        self.tiers.keep([block_hash])
        (block,) = self._take(1)
        self._ahead[block_hash] = self.tiers.load(block_hash, block)
        self.tiers.keep(())
        self.cache(block, block_hash)
        self.release([block])
        return True

    def _places(self, hashes: Iterable[BlockHash]) -> Iterator[tuple[BlockHash, CacheTier]]:
        """The leading run that any tier holds."""
        for block_hash in hashes:
            place = self.place(block_hash)
            if place is None:
                return
            yield block_hash, place

    def _take(self, num_blocks: int) -> list[int]:
        taken = []
        for _ in range(num_blocks):
            block, _nothing = self._free.popitem(last=False)
            block_hash = self._hash_of[block]
            if block_hash is not None:
                self.tiers.save(block_hash, block)
                self._uncache(block, block_hash)
            self._references[block] = 1
            taken.append(block)
        return taken

    def _uncache(self, block: int, block_hash: BlockHash) -> None:
        self.moves.note(block_hash)
        self._hash_of[block] = None
        self._ahead.pop(block_hash, None)
        del self._cached[block_hash]

    def _drop_reference(self, block: int) -> None:
        if self._references[block] <= 0:
            raise InvariantBroken(f"block {block} freed twice")
        self._references[block] -= 1
