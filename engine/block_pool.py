"""Which KV block belongs to whom: references, the per-worker prefix cache, and quarantine.

Every block is in exactly one of three places:
- free: nobody refers to it; it may keep the hash of what it holds and is then a cached block that can be revived
  until it is taken for something else, least recently used first;
- used: one or more references;
- quarantined: a write from a peer may still come; nobody may have it.

free + used + quarantined = total, always (`check`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from core.errors import InvariantBroken
from core.identity import BlockHash


@dataclass(frozen=True, slots=True)
class CacheChanges:
    """Hashes that became findable in this worker, or ceased to be, since the last look."""

    stored: tuple[BlockHash, ...]
    evicted: tuple[BlockHash, ...]


@dataclass(slots=True)
class _Changes:
    """Net changes: a hash stored and evicted between two looks is in neither."""

    stored: dict[BlockHash, None] = field(default_factory=dict)
    evicted: dict[BlockHash, None] = field(default_factory=dict)

    def store(self, block_hash: BlockHash) -> None:
        if block_hash in self.evicted:
            del self.evicted[block_hash]
        else:
            self.stored[block_hash] = None

    def evict(self, block_hash: BlockHash) -> None:
        if block_hash in self.stored:
            del self.stored[block_hash]
        else:
            self.evicted[block_hash] = None


class BlockPool:
    """Hands out block ids in [0, num_blocks). Touches no memory: the KV bytes are the runner's."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._hash_of: list[BlockHash | None] = [None] * num_blocks
        self._cached: dict[BlockHash, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._quarantined: set[int] = set()
        self._changes = _Changes()

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

    def match(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Blocks of the longest leading run of `hashes` held here. Takes no reference."""
        found = []
        for block_hash in hashes:
            block = self._cached.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def acquire(
        self, hashes: Sequence[BlockHash], num_blocks: int, keep_free: int = 0
    ) -> tuple[list[int], list[int]] | None:
        """Take a reference on every cached block of the leading run of `hashes`, and fresh blocks up to `num_blocks`.

        At least `keep_free` blocks stay free.

        Returns: (hit blocks, fresh blocks), or None, with nothing changed, when there is not enough room.
        """
        hits = self.match(hashes)[:num_blocks]
        revived = sum(1 for block in hits if self._references[block] == 0)
        if revived + num_blocks - len(hits) + keep_free > self.num_free:
            return None
        self.hold(hits)
        return hits, self._take(num_blocks - len(hits))

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
        self._cached[block_hash] = block
        self._hash_of[block] = block_hash
        self._changes.store(block_hash)

    def forget(self, blocks: Iterable[int]) -> None:
        """Make blocks unfindable, whoever else holds them: what they hold is not to be relied on."""
        for block in blocks:
            self._forget(block)

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

    def is_cached(self, block_hash: BlockHash) -> bool:
        return block_hash in self._cached

    def cached_hashes(self) -> tuple[BlockHash, ...]:
        """Every hash that is findable here now."""
        return tuple(self._cached)

    @property
    def has_changes(self) -> bool:
        """Something became findable or ceased to be since `take_changes`."""
        return bool(self._changes.stored or self._changes.evicted)

    def take_changes(self) -> CacheChanges:
        """What became findable or ceased to be since the last call."""
        changes, self._changes = self._changes, _Changes()
        return CacheChanges(tuple(changes.stored), tuple(changes.evicted))

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

    def _take(self, num_blocks: int) -> list[int]:
        taken = []
        for _ in range(num_blocks):
            block, _nothing = self._free.popitem(last=False)
            self._forget(block)
            self._references[block] = 1
            taken.append(block)
        return taken

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of[block]
        if block_hash is not None:
            self._hash_of[block] = None
            del self._cached[block_hash]
            self._changes.evict(block_hash)

    def _drop_reference(self, block: int) -> None:
        if self._references[block] <= 0:
            raise InvariantBroken(f"block {block} freed twice")
        self._references[block] -= 1
