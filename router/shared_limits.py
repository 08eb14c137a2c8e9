"""Tenants' limits over all routers of a model: in Redis, by one round trip; each router alone while Redis is away.

Keys, of one model and tenant, which are in one cluster slot (the braces are a hash tag):
  limits:{MODEL/TENANT}:open     sorted set: permit -> when its lease ends, in ms of the server's clock
  limits:{MODEL/TENANT}:bucket   hash: level (tokens, negative: debt), at_ms
A router renews the leases of what it has open, so that a dead one's permits end by themselves, and a server that lost
all it had knows them again. The router's own books go on beside: they are what it obeys while Redis is away.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from kv_transfer.bounded_redis import BoundedRedis
from router.admission.limits import Permit, TenantLimits
from router.admission.policy import TenantPolicy
from router.admission.shared_claims import TAKEN, Answer, Claim, Return, SharedClaims
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

# KEYS: open, bucket. ARGV: tokens, lease in ms, most open (-1: any), tokens per ms (0: any), bucket's size, then the
# permit's names, each of which counts as open.
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
redis.call('ZREMRANGEBYSCORE', KEYS[1], '(' .. string.format('%.0f', now_ms + ARGV[2]), '+inf')
local most_open, rate, most_debt = tonumber(ARGV[3]), tonumber(ARGV[4]), 1e9
local wanted = math.min(#ARGV - 5, most_open)
if most_open >= 0 and redis.call('ZCARD', KEYS[1]) + wanted > most_open then return {'open', 0} end
if rate > 0 then
  local tokens, size = tonumber(ARGV[1]), tonumber(ARGV[5])
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
for index = 6, #ARGV do redis.call('ZADD', KEYS[1], now_ms + ARGV[2], ARGV[index]) end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return {'taken', 0}
"""
)

# KEYS: open, bucket. ARGV: tokens that it was charged with and did not use, then the permit's names.
_GIVE_BACK: Final = """
if redis.call('ZREM', KEYS[1], unpack(ARGV, 2)) > 0 and redis.call('EXISTS', KEYS[2]) == 1 then
  redis.call('HINCRBYFLOAT', KEYS[2], 'level', ARGV[1])
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
        self._own = own
        self._claims = SharedClaims(router_id, own, policy_of)
        self._spawn = spawn
        self._lease_s = lease_s
        self._redis = BoundedRedis(url, "shared limits", _TAKE, TAKE_TIMEOUT_S, BACKOFF_S, on_failure=lambda: None)
        client = self._redis.client
        self._take = client.register_script(_TAKE)
        self._give_back = client.register_script(_GIVE_BACK)
        self._renew = client.register_script(_RENEW)

    @property
    def away(self) -> bool:
        """This router is alone with its own books."""
        return self._redis.away

    async def take(self, tenant: str, num_tokens: int, num_choices: int = 1) -> Permit:
        """Returns within TAKE_TIMEOUT_S. Raises: Rejected: the tenant has what it may have."""
        claim = self._claims.claim(tenant, num_tokens, num_choices)
        if claim is None:
            return self._own.take(tenant, num_tokens, time.monotonic(), num_choices)
        answer: Answer | None = None
        try:
            answer = await self._ask(claim)
            return self._claims.decide(claim, answer, time.monotonic())
        except BaseException:
            if answer is None or answer.verdict == TAKEN:  # its client left, or no answer came, or others were faster
                self._spawn(self._tell(self._claims.unclaim(claim)))
            raise

    def give_back(self, permit: Permit, used_tokens: int) -> None:
        """Its request is over."""
        back = self._claims.give_back(permit, used_tokens, time.monotonic())
        if back is not None:
            self._spawn(self._tell(back))

    async def renew_forever(self) -> None:
        """Keep the leases of what is open; until cancelled."""
        while True:
            await asyncio.sleep(self._lease_s / 3)
            for tenant, names in self._claims.open_names().items():
                for start in range(0, len(names), PERMITS_PER_WRITE):
                    await self._renew_some(tenant, names[start : start + PERMITS_PER_WRITE])

    async def close(self) -> None:
        """Disconnect; what is open ends by its lease."""
        await self._redis.close()

    async def _ask(self, claim: Claim) -> Answer | None:
        """None: Redis is away, or took too long, and may have given the permit."""
        policy = claim.policy
        most_open = -1 if policy.max_concurrent is None else policy.max_concurrent
        tokens_per_ms = (policy.tokens_per_s or 0.0) / 1000
        arguments: list[Any] = [
            claim.num_tokens,
            self._lease_ms,
            most_open,
            tokens_per_ms,
            policy.bucket_tokens,
            *claim.names,
        ]
        call = partial(self._take, self._keys(claim.tenant), arguments)
        answer = await self._redis.bounded(TAKE_TIMEOUT_S, call)
        return None if answer is None else Answer(answer[0].decode(), answer[1] / 1000)

    async def _tell(self, back: Return) -> None:
        call = partial(self._give_back, self._keys(back.tenant), [back.unused_tokens, *back.names])
        await self._redis.bounded(WRITE_TIMEOUT_S, call)

    async def _renew_some(self, tenant: str, names: list[str]) -> None:
        call = partial(self._renew, self._keys(tenant)[:1], [self._lease_ms, *names])
        await self._redis.bounded(WRITE_TIMEOUT_S, call)

    def _keys(self, tenant: str) -> list[str]:
        return [f"limits:{{{self._model_name}/{tenant}}}:{kind}" for kind in ("open", "bucket")]

    @property
    def _lease_ms(self) -> int:
        return int(self._lease_s * 1000)
