"""Tenants' limits over all routers of a model: in Redis, by one round trip; each router alone while Redis is away.

Keys, of one model and tenant, which are in one cluster slot (the braces are a hash tag):
  limits:{MODEL/TENANT}:open     sorted set: permit -> when its lease ends, in ms of the server's clock
  limits:{MODEL/TENANT}:bucket   hash: level (tokens, negative: debt), at_ms
A router renews the leases of what it has open, so that a dead one's permits end by themselves, and a server that lost
all it had knows them again. The router's own books go on beside: they are what it obeys while Redis is away.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from kv_transfer.bounded_redis import BoundedRedis
from router.admission.limits import Permit, TenantLimits
from router.admission.policy import TenantPolicy
from telemetry.tasks import Spawn

TAKE_TIMEOUT_S: Final = 0.05  # what a request may wait for it
WRITE_TIMEOUT_S: Final = 1.0  # for what no request waits for
BACKOFF_S: Final = 1.0
LEASE_S: Final = 10.0
PERMITS_PER_WRITE: Final = 1000

_NOW: Final = """
local clock = redis.call('TIME')
local now_ms = clock[1] * 1000 + math.floor(clock[2] / 1000)
"""

# KEYS: open, bucket. ARGV: permit, tokens, lease in ms, most open (-1: any), tokens per ms (0: any), bucket's size.
# Returns the verdict, and for how many ms the bucket lacks tokens. What is not ours under our keys is as if it were not
# there, and so is a lease that no router can have given: the clock of a server that took over may be behind.
_TAKE: Final = (
    _NOW
    + """
for index, kind in ipairs({'zset', 'hash'}) do
  local found = redis.call('TYPE', KEYS[index]).ok
  if found ~= 'none' and found ~= kind then redis.call('DEL', KEYS[index]) end
end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now_ms)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '(' .. string.format('%.0f', now_ms + ARGV[3]), '+inf')
local most_open, rate, most_debt = tonumber(ARGV[4]), tonumber(ARGV[5]), 1e9
if most_open >= 0 and redis.call('ZCARD', KEYS[1]) >= most_open then return {'open', 0} end
if rate > 0 then
  local tokens, size = tonumber(ARGV[2]), tonumber(ARGV[6])
  local known = redis.call('HMGET', KEYS[2], 'level', 'at_ms')
  local level, at_ms = tonumber(known[1] or ''), tonumber(known[2] or '')
  if not (level and at_ms and level >= -most_debt) then level, at_ms = size, now_ms end
  level = math.min(size, level + rate * math.max(0, now_ms - at_ms))
  local missing = math.min(tokens, size) - level
  if missing > 0 then
    if at_ms > now_ms then redis.call('HSET', KEYS[2], 'at_ms', now_ms) end
    return {'tokens', math.ceil(missing / rate)}
  end
  redis.call('HSET', KEYS[2], 'level', level - tokens, 'at_ms', now_ms)
  redis.call('PEXPIRE', KEYS[2], math.ceil((size - level + tokens) / rate) + 60000)  -- by then it is full
end
redis.call('ZADD', KEYS[1], now_ms + ARGV[3], ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return {'taken', 0}
"""
)

# KEYS: open, bucket. ARGV: permit, tokens that it was charged with and did not use.
_GIVE_BACK: Final = """
if redis.call('ZREM', KEYS[1], ARGV[1]) == 1 and redis.call('EXISTS', KEYS[2]) == 1 then
  redis.call('HINCRBYFLOAT', KEYS[2], 'level', ARGV[2])
end
return 1
"""

# KEYS: open. ARGV: lease in ms, then each permit.
_RENEW: Final = (
    _NOW
    + """
for index = 2, #ARGV do redis.call('ZADD', KEYS[1], now_ms + ARGV[1], ARGV[index]) end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return 1
"""
)


class SharedLimiter:
    """The Limiter of a router that shares its tenants with others.

    Args:
        url: of Redis or Valkey.
        model_name: routers of one model share their limits.
        router_id: of this life of the router alone.
        own: this router's books.
        policy_of: a tenant's limits, now.
        spawn: runs a task and watches over it.
    """

    def __init__(
        self,
        url: str,
        model_name: str,
        router_id: str,
        own: TenantLimits,
        policy_of: Callable[[str], TenantPolicy],
        spawn: Spawn,
        lease_s: float = LEASE_S,
    ) -> None:
        self._model_name = model_name
        self._router_id = router_id
        self._own = own
        self._policy_of = policy_of
        self._spawn = spawn
        self._lease_s = lease_s
        self._serials = itertools.count(1)
        self._open: dict[Permit, str] = {}  # what Redis calls it
        self._redis = BoundedRedis(url, "shared limits", _TAKE, TAKE_TIMEOUT_S, BACKOFF_S, on_failure=lambda: None)
        client = self._redis.client
        self._take = client.register_script(_TAKE)
        self._give_back = client.register_script(_GIVE_BACK)
        self._renew = client.register_script(_RENEW)

    @property
    def away(self) -> bool:
        """This router is alone with its own books."""
        return self._redis.away

    async def take(self, tenant: str, num_tokens: int) -> Permit:
        """Returns within TAKE_TIMEOUT_S. Raises: Rejected: the tenant has what it may have."""
        policy = self._policy_of(tenant)
        if policy.max_concurrent is None and policy.tokens_per_s is None:
            return self._own.take(tenant, num_tokens, time.monotonic())
        name = f"{self._router_id}.{next(self._serials)}"
        permit = await self._ask(name, tenant, policy, num_tokens)
        self._open[permit] = name
        return permit

    def give_back(self, permit: Permit, used_tokens: int) -> None:
        """Its request is over."""
        self._own.give_back(permit, used_tokens, time.monotonic())
        name = self._open.pop(permit, None)
        if name is not None:
            self._return(name, permit.tenant, permit.charged_tokens - used_tokens)

    async def renew_forever(self) -> None:
        """Keep the leases of what is open; until cancelled."""
        while True:
            await asyncio.sleep(self._lease_s / 3)
            names: dict[str, list[str]] = {}  # by key
            for permit, name in self._open.items():
                names.setdefault(self._keys(permit.tenant)[0], []).append(name)
            for key, permits in names.items():
                for start in range(0, len(permits), PERMITS_PER_WRITE):
                    some = permits[start : start + PERMITS_PER_WRITE]
                    await self._redis.bounded(WRITE_TIMEOUT_S, partial(self._renew, [key], [self._lease_ms, *some]))

    async def close(self) -> None:
        """Disconnect; what is open ends by its lease."""
        await self._redis.close()

    async def _ask(self, name: str, tenant: str, policy: TenantPolicy, num_tokens: int) -> Permit:
        most_open = -1 if policy.max_concurrent is None else policy.max_concurrent
        tokens_per_ms = (policy.tokens_per_s or 0.0) / 1000
        arguments: Sequence[Any] = [
            name, num_tokens, self._lease_ms, most_open, tokens_per_ms, policy.bucket_tokens
        ]  # fmt: skip
        try:
            answer = await self._redis.bounded(TAKE_TIMEOUT_S, partial(self._take, self._keys(tenant), arguments))
            if answer is None:
                return self._own.take(tenant, num_tokens, time.monotonic())
        except BaseException:  # its client left, or no answer came in time: Redis may have given it all the same
            self._return(name, tenant, num_tokens)
            raise
        verdict, wait_ms = answer
        if verdict == b"open":
            raise self._own.too_many_open(tenant, policy)
        if verdict == b"tokens":
            raise self._own.too_many_tokens(tenant, policy, wait_ms / 1000)
        return self._own.admit(tenant, policy, num_tokens, time.monotonic())

    def _return(self, name: str, tenant: str, unused_tokens: int) -> None:
        call = partial(self._give_back, self._keys(tenant), [name, unused_tokens])
        self._spawn(self._write(call))

    async def _write(self, call: Callable[[], Any]) -> None:
        await self._redis.bounded(WRITE_TIMEOUT_S, call)

    def _keys(self, tenant: str) -> list[str]:
        return [f"limits:{{{self._model_name}/{tenant}}}:{kind}" for kind in ("open", "bucket")]

    @property
    def _lease_ms(self) -> int:
        return int(self._lease_s * 1000)
