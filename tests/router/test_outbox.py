"""Joining deltas changes no token, and readers are woken however much there is to do."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from core.errors import Rejected, RejectReason
from core.request import FinishReason, TokenDelta, TokenLogprobs, WorkUsage
from router.outbox import BUSY_SHARE, MAX_PAUSE_S, PAUSE_SHARE, SHORT_TURN_S, Outbox, Turns, joined, pause_s


def delta(position: int, choice: int = 0) -> TokenDelta:
    return TokenDelta("r", position, (10 * choice + position,), logprobs=(TokenLogprobs(-position),), choice=choice)


def test_a_choice_goes_on_in_one_delta() -> None:
    last = replace(delta(2), finish_reason=FinishReason.STOP, matched_stop="x")
    (whole,) = joined([delta(0), delta(1), last])
    assert whole == replace(
        last, position=0, token_ids=(0, 1, 2), logprobs=(TokenLogprobs(0), TokenLogprobs(-1), TokenLogprobs(-2))
    )


def test_choices_stay_apart_and_in_order() -> None:
    items = [delta(0), delta(0, 1), delta(1), delta(1, 1), None]
    first, second, end = joined(items)
    assert isinstance(first, TokenDelta) and isinstance(second, TokenDelta) and end is None
    assert (first.choice, first.token_ids, second.choice, second.token_ids) == (0, (0, 1), 1, (10, 11))


def test_each_report_of_a_worker_is_kept() -> None:
    """The first delta of each worker has one: after a hand-off or a migration there are two."""
    reports = [replace(delta(at), usage=WorkUsage(computed_tokens=at + 1)) for at in (0, 1)]
    assert joined([*reports, delta(2)]) == [reports[0], replace(reports[1], token_ids=(1, 2), logprobs=(
        TokenLogprobs(-1), TokenLogprobs(-2)))]  # fmt: skip


def test_a_failure_stays_behind_the_tokens_before_it() -> None:
    error, broken = Rejected(RejectReason.TIMEOUT, "late"), replace(delta(1), finish_reason=FinishReason.ERROR)
    assert joined([delta(0), error]) == [delta(0), error]
    assert joined([delta(0), broken]) == [delta(0), broken]


async def test_a_reader_has_all_that_is_there_at_once() -> None:
    outbox = Outbox(Turns())
    reader = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    outbox.put(delta(0))
    outbox.put(delta(1))
    (whole,) = await reader
    assert isinstance(whole, TokenDelta) and whole.token_ids == (0, 1)
    outbox.put(None)
    assert await outbox.take() == [None]


async def test_who_is_slow_stops_nobody_and_has_all_of_it_later() -> None:
    turns = Turns()
    slow, quick = Outbox(turns), Outbox(turns)
    reader = asyncio.create_task(quick.take())
    await asyncio.sleep(0)
    for position in range(3):
        for outbox in (slow, quick):
            outbox.put(delta(position))
        async with asyncio.timeout(10.0):
            assert await reader == [delta(position)]
        reader = asyncio.create_task(quick.take())
        await asyncio.sleep(0)
    reader.cancel()
    (whole,) = await slow.take()
    assert isinstance(whole, TokenDelta) and whole.token_ids == (0, 1, 2)


@pytest.mark.parametrize(
    ("turn_s", "busy", "paused"), [(0.0, 1.0, False), (60.0, 1.0, True), (60.0, BUSY_SHARE / 2, False)]
)
async def test_after_a_long_turn_of_a_busy_process_nobody_is_woken_for_a_while(
    turn_s: float, busy: float, paused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now_s=0.0)
    times = SimpleNamespace(monotonic=lambda: clock.now_s, process_time=lambda: busy * clock.now_s)
    monkeypatch.setattr("router.outbox.time", times)
    monkeypatch.setattr("router.outbox.MAX_PAUSE_S", 3600.0)
    outbox, heard = Outbox(Turns()), []

    async def read() -> None:
        while True:
            heard.extend(await outbox.take())
            clock.now_s += turn_s

    reader = asyncio.create_task(read())
    for position in range(2):
        for _ in range(10):  # rounds of the loop, in none of which it has to wait
            await asyncio.sleep(0)
        outbox.put(delta(position))
    for _ in range(10):
        await asyncio.sleep(0)
    reader.cancel()
    assert heard == ([delta(0)] if paused else [delta(0), delta(1)])


def test_pauses_are_bounded() -> None:
    pauses_s = [pause_s(turn_s, 1.0, 1.0) for turn_s in (0.0, SHORT_TURN_S, 0.005, 9.0)]
    assert pauses_s == [0.0, 0.0, PAUSE_SHARE * 0.005, MAX_PAUSE_S]
