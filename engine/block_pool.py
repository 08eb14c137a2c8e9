"""Which KV block belongs to whom: references, the per-worker prefix cache, and quarantine.

Every block is in exactly one of three places:
- free: nobody refers to it; it may keep the hash of what it holds and is then a cached block that can be revived
  until it is taken for something else, least recently used first;
- used: one or more references;
- quarantined: a write from a peer may still come; nobody may have it.

free + used + quarantined = total, always (`check`).

A cached block that is taken for something else goes to the tiers below (engine/cache_tiers.py), where there are any,
and comes back into a fresh block when it is hit there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

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

        Blocks of the run that only the host has are copied into fresh ones, and are hits too. At least `keep_free`
        blocks stay free.

        Returns: (hit blocks, fresh blocks), or None, with nothing changed, when there is not enough room.
        """
        run = self._run(hashes[:num_blocks])
        here = [block for block in run if block is not None]
        revived = sum(1 for block in here if self._references[block] == 0)
        if revived + num_blocks - len(here) + keep_free > self.num_free:
            return None
        self.hold(here)
        self.hit_blocks[CacheTier.DEVICE] += len(here)
        absent = [block_hash for block_hash, block in zip(hashes, run, strict=False) if block is None]
        self.tiers.keep(absent)
        fresh = self._take(num_blocks - len(here))
        for block_hash, block in zip(absent, fresh, strict=False):
            self.hit_blocks[self.tiers.load(block_hash, block)] += 1
            self.cache(block, block_hash)
        self.tiers.keep(())
        return [self._cached[block_hash] for block_hash in hashes[: len(run)]], fresh[len(absent) :]

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

    def _run(self, hashes: Iterable[BlockHash]) -> list[int | None]:
        """Blocks of the longest leading run that can be had at once; None for those that only the host has."""
        found = []
        for block_hash in hashes:
            block = self._cached.get(block_hash)
            if block is None and self.tiers.place(block_hash) is not CacheTier.HOST:
                break
            found.append(block)
        return found

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
        del self._cached[block_hash]

    def _drop_reference(self, block: int) -> None:
        if self._references[block] <= 0:
            raise InvariantBroken(f"block {block} freed twice")
        self._references[block] -= 1
