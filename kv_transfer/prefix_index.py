"""Which worker holds which cached block: a shared index in Redis or Valkey. It costs hits, never a request.

Keys, all in one cluster slot of an identity (the braces are a hash tag; 16 hex digits of its digest):
  kv:{IDENTITY}:BLOCK_HASH   hash: holder -> when its entry ends, in ms of the server's clock
  kv:{IDENTITY}:by:HOLDER    set of the block hashes that one incarnation announced, so that it can be purged
Entries end after `ttl_s` unless announced again; both keys carry it as their own TTL too, so nothing stays forever.
A lookup is advice: a holder checks its own cache before it pushes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from core.identity import BlockHash
from core.membership import WorkerRef
from kv_transfer.bounded_redis import BoundedRedis
from telemetry.logs import log_state

logger = logging.getLogger(__name__)

_LOOKUP: Final = """
local clock = redis.call('TIME')
local now_ms = clock[1] * 1000 + math.floor(clock[2] / 1000)
local num_blocks, holders = 0, {}
for index, key in ipairs(KEYS) do
  local entry, still = redis.call('HGETALL', key), {}
  for field = 1, #entry, 2 do
    local name = entry[field]
    if name ~= ARGV[1] and tonumber(entry[field + 1]) > now_ms and (index == 1 or holders[name]) then
      still[name] = true
    end
  end
  if next(still) == nil then break end
  num_blocks, holders = index, still
end
local names = {}
for name in pairs(holders) do names[#names + 1] = name end
table.sort(names)
return {num_blocks, names}
"""

# The last key is the holder's own set; ARGV: holder, TTL in ms, then the hash of each block.
_ANNOUNCE: Final = """
local clock = redis.call('TIME')
local ends_ms = clock[1] * 1000 + math.floor(clock[2] / 1000) + ARGV[2]
for index = 1, #KEYS - 1 do
  redis.call('HSET', KEYS[index], ARGV[1], ends_ms)
  redis.call('PEXPIRE', KEYS[index], ARGV[2])
  redis.call('SADD', KEYS[#KEYS], ARGV[index + 2])
end
redis.call('PEXPIRE', KEYS[#KEYS], ARGV[2])
return 1
"""

# As above, without the TTL.
_WITHDRAW: Final = """
for index = 1, #KEYS - 1 do
  redis.call('HDEL', KEYS[index], ARGV[1])
  redis.call('SREM', KEYS[#KEYS], ARGV[index + 1])
end
return 1
"""

_BLOCKS_PER_WRITE: Final = 1000  # a script holds up every other client while it runs: keep it below a few ms


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The longest leading run of blocks that one other worker holds whole, and all workers that do."""

    num_blocks: int = 0
    holders: tuple[WorkerRef, ...] = ()  # by name


@dataclass(slots=True)
class IndexStats:
    """Totals since start."""

    lookups: int = 0
    hit_blocks: int = 0
    failures: int = 0  # calls that Redis failed or did not answer in time


class PrefixIndex(Protocol):
    """What workers know of each other's caches. No call raises for the index being slow or away."""

    stats: IndexStats

    async def announce(self, hashes: Sequence[BlockHash]) -> None:
        """This worker holds these blocks now. Announce again within the TTL to keep them."""
        ...

    async def withdraw(self, hashes: Sequence[BlockHash]) -> None:
        """This worker no longer holds these blocks."""
        ...

    async def lookup(self, hashes: Sequence[BlockHash]) -> PrefixHit:
        """Who else holds the longest leading run of `hashes`, in prompt order."""
        ...

    async def purge(self, ref: WorkerRef) -> None:
        """Forget everything that a dead incarnation announced."""
        ...

    async def close(self) -> None:
        """Disconnect; entries stay until purged or expired. Idempotent."""
        ...


class NoPrefixIndex:
    """The PrefixIndex of a cluster without one: nobody else holds anything."""

    def __init__(self) -> None:
        self.stats = IndexStats()

    async def announce(self, hashes: Sequence[BlockHash]) -> None:
        pass

    async def withdraw(self, hashes: Sequence[BlockHash]) -> None:
        pass

    async def lookup(self, hashes: Sequence[BlockHash]) -> PrefixHit:  # noqa: ARG002
        return PrefixHit()

    async def purge(self, ref: WorkerRef) -> None:
        pass

    async def close(self) -> None:
        pass


class RedisPrefixIndex:
    """A PrefixIndex in Redis or Valkey; connects when first used.

    Args:
        url: as in redis_url.py.
        ref: this worker; excluded from its own lookups.
        ttl_s: how long an announcement lasts.
        timeout_s: bound of one lookup. Writes, which no request waits for, get `write_timeout_s`.
        backoff_s: after a failure lookups answer empty at once; the server is tried again at this period, in the
            background.
    """

    def __init__(
        self,
        url: str,
        ref: WorkerRef,
        identity_digest: bytes,
        ttl_s: float,
        timeout_s: float = 0.05,
        write_timeout_s: float = 1.0,
        backoff_s: float = 1.0,
    ) -> None:
        self._name = str(ref)
        self._prefix = f"kv:{{{identity_digest.hex()[:16]}}}:"
        self._ttl_ms = int(ttl_s * 1000)
        self._timeout_s = timeout_s
        self._write_timeout_s = write_timeout_s
        self.stats = IndexStats()
        self._redis = BoundedRedis(url, "prefix index", _LOOKUP, timeout_s, backoff_s, self._failed)
        self._lookup = self._redis.client.register_script(_LOOKUP)
        self._announce = self._redis.client.register_script(_ANNOUNCE)
        self._withdraw = self._redis.client.register_script(_WITHDRAW)

    @property
    def away(self) -> bool:
        """Whether the server failed a call and has not answered since."""
        return self._redis.away

    async def announce(self, hashes: Sequence[BlockHash]) -> None:
        for some in _batches(hashes):
            keys = [*map(self._block_key, some), self._holder_key(self._name)]
            call = partial(self._announce, keys, [self._name, self._ttl_ms, *some])
            await self._redis.bounded(self._write_timeout_s, call)

    async def withdraw(self, hashes: Sequence[BlockHash]) -> None:
        for some in _batches(hashes):
            await self._forget(self._name, some)

    async def lookup(self, hashes: Sequence[BlockHash]) -> PrefixHit:
        self.stats.lookups += 1
        if not hashes or self.away:
            return PrefixHit()
        keys = [self._block_key(block_hash) for block_hash in hashes]
        answer = await self._redis.bounded(self._timeout_s, partial(self._lookup, keys, [self._name]))
        if answer is None:
            return PrefixHit()
        num_blocks, names = answer
        try:
            holders = tuple(WorkerRef.parse(name.decode()) for name in names)
        except ValueError as error:  # the server is shared: others can write under our keys
            self.stats.failures += 1
            reason = f"not written by a worker: {error}"
            log_state(logger, logging.WARNING, redis="prefix index", state="ignored", reason=reason)
            return PrefixHit()
        self.stats.hit_blocks += num_blocks
        return PrefixHit(num_blocks, holders)

    async def purge(self, ref: WorkerRef) -> None:
        """What a failure leaves behind expires by its TTL."""
        name = str(ref)
        while not self.away:
            pop = partial(self._redis.client.spop, self._holder_key(name), _BLOCKS_PER_WRITE)
            some = await self._redis.bounded(self._write_timeout_s, pop)
            if not some:
                return
            await self._forget(name, some)

    async def close(self) -> None:
        await self._redis.close()

    async def _forget(self, name: str, hashes: Sequence[BlockHash]) -> None:
        keys = [*map(self._block_key, hashes), self._holder_key(name)]
        await self._redis.bounded(self._write_timeout_s, partial(self._withdraw, keys, [name, *hashes]))

    def _failed(self) -> None:
        self.stats.failures += 1

    def _block_key(self, block_hash: BlockHash) -> str:
        return self._prefix + block_hash.hex()

    def _holder_key(self, name: str) -> str:
        return f"{self._prefix}by:{name}"


def _batches(hashes: Sequence[BlockHash]) -> Iterator[Sequence[BlockHash]]:
    for start in range(0, len(hashes), _BLOCKS_PER_WRITE):
        yield hashes[start : start + _BLOCKS_PER_WRITE]
