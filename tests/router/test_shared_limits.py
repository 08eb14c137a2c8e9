"""Two routers share their tenants' limits in a real Valkey, and each goes on alone while that is away."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import redis

from core.errors import Rejected, RejectReason
from router import shared_limits
from router.admission.limits import TenantLimits
from router.admission.policy import AdmissionPolicy, TenantPolicy
from router.admission.shared_claims import TAKEN, TOO_MANY_OPEN, TOO_MANY_TOKENS, Claim, Return
from router.shared_limits import SharedLimiter
from tests.kv_transfer.valkey_process import Valkey, valkey
from tests.simulation.world_limits import LimitsServer

POLICY = AdmissionPolicy(
    tenants={
        "two": TenantPolicy(max_concurrent=2),
        "slow": TenantPolicy(tokens_per_s=0.001, burst_tokens=100),
        "both": TenantPolicy(max_concurrent=3, tokens_per_s=0.001, burst_tokens=100),
        "any": TenantPolicy(),
    }
)


@pytest.fixture(scope="module", params=[False, True], ids=["server", "cluster"])
def server(request: pytest.FixtureRequest) -> Iterator[Valkey]:
    with valkey(cluster=request.param) as running:
        yield running


@pytest.fixture
async def make(server: Valkey, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., SharedLimiter]]:
    monkeypatch.setattr(shared_limits, "TAKE_TIMEOUT_S", 5.0)  # a machine that stalls must not look like Redis away
    with redis.Redis(port=server.port) as client:
        client.flushall()
    made: list[SharedLimiter] = []
    tasks: list[asyncio.Task[None]] = []

    def spawn(work) -> asyncio.Task[None]:  # type: ignore[no-untyped-def]
        tasks.append(asyncio.create_task(work))
        return tasks[-1]

    def build(router_id: str, lease_s: float = 10.0) -> SharedLimiter:
        limiter = SharedLimiter(
            server.url, "model", router_id, TenantLimits(POLICY.tenant), POLICY.tenant, spawn, lease_s
        )
        made.append(limiter)
        return limiter

    yield build
    for limiter in made:
        await limiter.close()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def refused(limiter: SharedLimiter, tenant: str, num_tokens: int = 1) -> Rejected:
    with pytest.raises(Rejected) as caught:
        await limiter.take(tenant, num_tokens)
    return caught.value


async def until_taken(limiter: SharedLimiter, tenant: str) -> None:
    async with asyncio.timeout(10):
        while True:
            try:
                await limiter.take(tenant, 1)
                return
            except Rejected:
                await asyncio.sleep(0.01)


async def test_what_one_has_open_counts_at_the_other(make: Callable[..., SharedLimiter]) -> None:
    one, other = make("r1"), make("r2")
    first = await one.take("two", 5)
    await other.take("two", 5)
    for limiter in (one, other):
        error = await refused(limiter, "two")
        assert error.reason is RejectReason.TENANT_CONCURRENCY
    one.give_back(first, 5)
    await until_taken(other, "two")
    await refused(one, "two")
    for _ in range(5):
        await one.take("any", 1000)
    assert not one.away and not other.away


async def test_tokens_come_from_one_bucket_and_what_was_not_used_goes_back(make: Callable[..., SharedLimiter]) -> None:
    one, other = make("r1"), make("r2")
    permit = await one.take("slow", 90)
    error = await refused(other, "slow", 20)
    assert error.reason is RejectReason.TENANT_TOKENS
    assert 9_000 < (error.retry_after_s or 0) <= 10_000  # 10 tokens are missing
    one.give_back(permit, 30)

    async def is_back() -> bool:
        try:
            other.give_back(await other.take("slow", 60), 60)
        except Rejected:
            return False
        return True

    async with asyncio.timeout(10):
        while not await is_back():  # noqa: ASYNC110 - Redis has no event for it
            await asyncio.sleep(0.01)
    await refused(other, "slow", 20)


async def test_permits_of_a_dead_router_end_by_their_lease_and_those_of_a_living_one_do_not(
    make: Callable[..., SharedLimiter],
) -> None:
    dead, living = make("r1", lease_s=2.0), make("r2", lease_s=2.0)
    renewing = asyncio.create_task(living.renew_forever())
    try:
        await dead.take("two", 1)
        await living.take("two", 1)
        await refused(living, "two")
        await until_taken(make("r3"), "two")  # in the dead one's place
        await refused(make("r4"), "two")  # the living one's is renewed
    finally:
        renewing.cancel()


async def test_without_redis_each_is_alone_within_a_bound_and_what_is_open_counts_again_afterwards(
    make: Callable[..., SharedLimiter], server: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = make("r1", lease_s=1.5), make("r2")
    await one.take("two", 1)
    monkeypatch.setattr(shared_limits, "TAKE_TIMEOUT_S", 0.05)
    server.stop()
    try:
        begun_s = time.monotonic()
        await one.take("two", 1)
        await other.take("two", 1)
        await refused(one, "two")  # its own books say so
        assert one.away and other.away
        assert time.monotonic() - begun_s < 5.0  # not for as long as Redis is away
    finally:
        server.go_on()
    server.kill()
    server.start_again()  # empty
    monkeypatch.setattr(shared_limits, "TAKE_TIMEOUT_S", 5.0)
    renewing = asyncio.create_task(one.renew_forever())
    try:
        async with asyncio.timeout(20):
            while one.away or other.away:  # noqa: ASYNC110 - it is tried again in the background
                await asyncio.sleep(0.01)
            third = make("r3")
            while (error := await take_or_refused(third)) is None:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.01)
        assert error.reason is RejectReason.TENANT_CONCURRENCY
    finally:
        renewing.cancel()


async def take_or_refused(limiter: SharedLimiter) -> Rejected | None:
    """Gives back at once what it gets."""
    try:
        limiter.give_back(await limiter.take("two", 1), 1)
    except Rejected as error:
        return error
    return None


async def test_a_client_that_leaves_while_redis_is_asked_leaves_nothing(make: Callable[..., SharedLimiter]) -> None:
    limiter = make("r1")
    for _ in range(2):
        asking = asyncio.create_task(limiter.take("two", 1))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    await until_taken(limiter, "two")
    await until_taken(limiter, "two")


async def test_choices_count_and_a_request_of_more_than_may_be_open_goes_alone(
    make: Callable[..., SharedLimiter],
) -> None:
    one, other = make("r1"), make("r2")
    permit = await one.take("two", 1, num_choices=16)
    await refused(other, "two")
    one.give_back(permit, 1)
    await until_taken(other, "two")
    for limiter in (one, other):
        with pytest.raises(Rejected):
            await limiter.take("two", 1, num_choices=2)
    await one.take("two", 1)


async def test_the_simulated_server_says_what_the_scripts_say(make: Callable[..., SharedLimiter]) -> None:
    """tests/simulation/test_limits_world.py walks with it."""
    limiter, model, rng = make("r1", lease_s=1000.0), LimitsServer(), random.Random(0)
    claims: list[Claim] = []
    verdicts: Counter[str] = Counter()
    for serial in range(200):
        now, tenant = time.time(), rng.choice(["two", "slow", "both"])
        match rng.randrange(4):
            case 0 | 1:
                names = tuple(f"x{serial}.{choice}" for choice in range(rng.choice([1, 1, 2, 5])))
                claim = Claim(names, tenant, POLICY.tenant(tenant), rng.randrange(1, 60))
                told, expected = await limiter._ask(claim), model.take(claim, 1000.0, now)
                assert told is not None and told.verdict == expected.verdict
                assert told.wait_s == pytest.approx(expected.wait_s, abs=20.0)  # the rate is 0.001 tokens/s
                verdicts[told.verdict] += 1
                claims.append(claim)
            case 2 if claims:
                claim = claims.pop(rng.randrange(len(claims)))
                back = Return(claim.names, claim.tenant, rng.randrange(claim.num_tokens))
                await limiter._tell(back)
                model.give_back(back)
            case 3 if claims:
                claim = rng.choice(claims)
                await limiter._renew_some(claim.tenant, list(claim.names))
                model.renew(claim.tenant, list(claim.names), 1000.0, now)
    assert min(verdicts[verdict] for verdict in (TAKEN, TOO_MANY_OPEN, TOO_MANY_TOKENS)) > 5, verdicts


HOUR_MS = 3_600_000
OPEN, BUCKET = "limits:{{model/{}}}:open", "limits:{{model/{}}}:bucket"


@pytest.mark.parametrize("where", [OPEN, BUCKET], ids=["open", "bucket"])
@pytest.mark.parametrize("lie", ["string", "list", "set", "hash", "zset"])
async def test_what_others_wrote_under_our_keys_is_as_if_it_were_not_there(
    make: Callable[..., SharedLimiter], server: Valkey, where: str, lie: str
) -> None:
    with redis.Redis(port=server.port) as client:
        for tenant in ("two", "slow"):
            key = where.format(tenant)
            write: dict[str, Callable[[], object]] = {
                "string": lambda key=key: client.set(key, "x"),  # type: ignore[misc]
                "list": lambda key=key: client.rpush(key, "x"),  # type: ignore[misc]
                "set": lambda key=key: client.sadd(key, "x"),  # type: ignore[misc]
                "hash": lambda key=key: client.hset(key, mapping={"level": "much", "at_ms": "now"}),  # type: ignore[misc]
                "zset": lambda key=key: client.zadd(key, {"x": time.time() * 1000 - 1}),  # type: ignore[misc]
            }
            write[lie]()
    limiter = make("r1")
    await limiter.take("two", 1)
    await limiter.take("two", 1)
    assert (await refused(limiter, "two")).reason is RejectReason.TENANT_CONCURRENCY
    await limiter.take("slow", 100)
    assert (await refused(limiter, "slow")).reason is RejectReason.TENANT_TOKENS
    assert not limiter.away


@pytest.mark.parametrize("level", ["nan", "inf", "-inf", "1e300", "-1e300", "", "0x"])
async def test_a_bucket_of_no_sense_is_a_full_one(
    make: Callable[..., SharedLimiter], server: Valkey, level: str
) -> None:
    with redis.Redis(port=server.port) as client:
        client.hset(BUCKET.format("slow"), mapping={"level": level, "at_ms": time.time() * 1000})
    limiter = make("r1")
    await limiter.take("slow", 100)
    assert (await refused(limiter, "slow")).reason is RejectReason.TENANT_TOKENS
    assert not limiter.away


async def test_a_server_whose_clock_is_behind_its_predecessors_holds_nobody_up(
    make: Callable[..., SharedLimiter], server: Valkey
) -> None:
    """As after a failover: leases end, and buckets fill, in its own time."""
    limiter = make("r1")
    with redis.Redis(port=server.port) as client:
        ahead_ms = time.time() * 1000 + HOUR_MS
        client.zadd(OPEN.format("two"), {"dead.1": ahead_ms, "dead.2": ahead_ms})
        client.hset(BUCKET.format("slow"), mapping={"level": 0, "at_ms": ahead_ms})
        await limiter.take("two", 1)
        assert (await refused(limiter, "slow")).reason is RejectReason.TENANT_TOKENS
        assert float(client.hget(BUCKET.format("slow"), "at_ms") or 0) < ahead_ms - HOUR_MS / 2  # type: ignore[arg-type]
    assert not limiter.away
