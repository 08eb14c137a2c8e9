"""A tenant that asks for many turns waits for itself; nobody who leaves keeps a turn."""

from __future__ import annotations

import asyncio
import random

import pytest

from router.front.fair_turn import FairTurn


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_tenants_take_turns_whoever_asked_more() -> None:
    turn, order = FairTurn(), list[str]()

    async def use(name: str) -> None:
        async with turn.of(name[0]):
            order.append(name)
            await asyncio.sleep(0)

    await asyncio.gather(*map(use, ["a1", "a2", "a3", "a4", "b1", "c1", "b2"]))
    assert order == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]


async def test_a_turn_that_comes_as_its_caller_leaves_goes_on_to_the_next() -> None:
    turn, order = FairTurn(), list[str]()

    async def use(name: str) -> None:
        async with turn.of(name):
            order.append(name)

    async with turn.of("a"):
        leaver, gone, last = (asyncio.create_task(use(name)) for name in "bcd")
        await settle()
        gone.cancel()  # while it waits
        await settle()
    leaver.cancel()  # as its turn is there
    async with asyncio.timeout(5):
        await asyncio.gather(leaver, gone, last, return_exceptions=True)
        await use("e")
    assert order == ["d", "e"]


@pytest.mark.parametrize("seed", range(20))
async def test_one_at_a_time_and_none_waits_for_ever_whoever_leaves(seed: int) -> None:
    rng, turn = random.Random(seed), FairTurn()
    inside = done = 0

    async def use(tenant: str) -> None:
        nonlocal inside, done
        async with turn.of(tenant):
            inside += 1
            assert inside == 1
            try:
                for _ in range(rng.randrange(3)):
                    await asyncio.sleep(0)
            finally:
                inside -= 1
            done += 1

    async def use_all() -> None:
        tasks: list[asyncio.Task[None]] = []
        for _ in range(100):
            tasks.append(asyncio.create_task(use(rng.choice("abc"))))
            if rng.random() < 0.4:
                rng.choice(tasks).cancel()
            if rng.random() < 0.5:
                await asyncio.sleep(0)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {type(None), asyncio.CancelledError}

    async with asyncio.timeout(20):
        await use_all()
        await use("last")
    assert done > 30
