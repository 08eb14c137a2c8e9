"""When the transfer thread sleeps, for how long, and what wakes it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kv_transfer.doorbell import Doorbell
from kv_transfer.polling import MANY_MISSED, PollingPeriods, PollingRhythm

PERIODS = PollingPeriods(active_s=1.0, linger_s=10.0, idle_s=50.0, unrung_s=5.0)
LONG_S = 20.0  # nothing here waits for so long, unless what must wake it does not


class Passes:
    """Passes of one thread, each as late as the last one said."""

    def __init__(self) -> None:
        self.rhythm = PollingRhythm(PERIODS)
        self._now_s = 0.0

    def sleep_s(self, *, ran: bool = False, moved: bool = False, rung: bool = False, in_flight: bool = False) -> float:
        wait_s = self.rhythm.passed(self._now_s, ran=ran, moved=moved, rung=rung, in_flight=in_flight)
        self._now_s += wait_s
        return wait_s

    def rest(self) -> float:
        """Passes without anything, until the thread is idle; how long it then sleeps."""
        while (wait_s := self.sleep_s()) <= PERIODS.active_s:
            assert self._now_s < 1e4
        return wait_s


def test_it_stays_quick_after_anything_and_then_rests() -> None:
    for event in ("ran", "moved", "rung"):
        passes = Passes()
        assert passes.rest() == PERIODS.idle_s
        assert passes.sleep_s(**{event: True}) == (PERIODS.active_s if event == "rung" else 0.0)
        assert [passes.sleep_s() for _ in range(9)] == [PERIODS.active_s] * 9
        assert passes.rest() == PERIODS.idle_s


def test_it_does_not_rest_while_operations_are_in_flight() -> None:
    passes = Passes()
    assert {passes.sleep_s(in_flight=True) for _ in range(100)} == {PERIODS.active_s}
    assert passes.rest() == PERIODS.idle_s


def test_notices_that_no_ring_announced_make_it_look_often_until_a_ring_comes() -> None:
    passes = Passes()
    for _ in range(MANY_MISSED):
        assert passes.rest() == PERIODS.idle_s
        passes.sleep_s(moved=True)
    passes.rest()
    assert passes.sleep_s() == PERIODS.unrung_s
    passes.sleep_s(moved=True)
    assert passes.rest() == PERIODS.unrung_s
    passes.sleep_s(rung=True)
    assert passes.rest() == PERIODS.idle_s


@pytest.mark.parametrize("announced", ["rung", "ran"])
def test_what_was_announced_is_not_missed(announced: str) -> None:
    passes = Passes()
    for _ in range(3 * MANY_MISSED):
        passes.rest()
        passes.sleep_s(moved=True, **{announced: True})
        passes.sleep_s(moved=True)  # while it is awake
    assert not passes.rhythm.unrung


def test_a_ring_that_comes_after_its_notice_is_not_missed() -> None:
    passes = Passes()
    for _ in range(3 * MANY_MISSED):
        passes.rest()
        passes.sleep_s(moved=True)
        passes.rest()
        passes.sleep_s(rung=True)  # it lay there when the thread began to rest
    assert not passes.rhythm.unrung


@pytest.fixture
def bells() -> Iterator[tuple[Doorbell, Doorbell]]:
    pair = Doorbell("127.0.0.1"), Doorbell("127.0.0.1")
    yield pair
    for bell in pair:
        bell.close()


def test_a_peers_ring_ends_the_wait(bells: tuple[Doorbell, Doorbell]) -> None:
    ours, theirs = bells
    assert not ours.wait(0.0)
    ringing = threading.Timer(0.02, theirs.ring, [ours.address])
    ringing.start()
    assert ours.wait(LONG_S)
    ringing.join()
    assert not ours.wait(0.0)


def test_a_wake_ends_the_wait_and_is_no_ring(bells: tuple[Doorbell, Doorbell]) -> None:
    waking = threading.Timer(0.02, bells[0].wake)
    waking.start()
    assert not bells[0].wait(LONG_S)
    waking.join()


def test_many_rings_are_one(bells: tuple[Doorbell, Doorbell]) -> None:
    for _ in range(50):
        bells[1].ring(bells[0].address)
    assert bells[0].wait(LONG_S)
    assert not bells[0].wait(0.0)


def test_a_ring_to_nowhere_is_ignored(bells: tuple[Doorbell, Doorbell]) -> None:
    for address in (("", 0), ("no address", 9), ("::1", 9), ("127.0.0.1", 9)):
        bells[0].ring(address)
    bells[0].ring(bells[1].address)
    assert bells[1].wait(LONG_S)


def test_an_address_that_is_not_ours_is_refused() -> None:
    with pytest.raises(OSError):
        Doorbell("192.0.2.1")
