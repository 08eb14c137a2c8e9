"""One place that fails: avoided, probed, used again."""

from __future__ import annotations

import random

import pytest

from router.policy.breaker import (
    BACKOFF_S,
    MOST_BACKOFF_S,
    MOST_FAILURES,
    MOST_PLACES,
    PROBE_TIMEOUT_S,
    Breakers,
)


def opened(now: float = 0.0) -> Breakers:
    breakers = Breakers()
    for _ in range(MOST_FAILURES):
        breakers.failed("d0", now)
    return breakers


def test_a_run_of_failures_opens_and_a_success_between_does_not() -> None:
    assert opened().avoided(0.0) == {"d0"}
    breakers = Breakers()
    for number in range(3 * MOST_FAILURES):
        breakers.failed("d0", float(number))
        if number % MOST_FAILURES == MOST_FAILURES - 2:
            breakers.succeeded("d0")
    assert breakers.avoided(0.0) == frozenset()


@pytest.mark.parametrize("works", [True, False])
def test_one_request_probes_it(works: bool) -> None:
    breakers = opened()
    assert breakers.avoided(BACKOFF_S) == frozenset()
    breakers.chosen("d0", BACKOFF_S)
    assert breakers.avoided(BACKOFF_S) == {"d0"}  # one is enough
    assert breakers.num_open == 1
    if works:
        breakers.succeeded("d0")
        assert (breakers.avoided(BACKOFF_S), breakers.num_open) == (frozenset(), 0)
    else:
        breakers.failed("d0", BACKOFF_S)
        assert breakers.avoided(BACKOFF_S + 2 * BACKOFF_S - 0.1) == {"d0"}
        assert breakers.avoided(BACKOFF_S + 2 * BACKOFF_S) == frozenset()


def test_a_probe_that_says_nothing_is_followed_by_another() -> None:
    breakers = opened()
    breakers.chosen("d0", 1.0)
    assert breakers.avoided(1.0 + PROBE_TIMEOUT_S) == frozenset()
    breakers.chosen("d0", 1.0 + PROBE_TIMEOUT_S)
    assert breakers.avoided(1.0 + PROBE_TIMEOUT_S) == {"d0"}


def test_a_place_that_fails_again_and_again_is_left_alone_for_longer_up_to_a_bound() -> None:
    breakers, now, waits = opened(), 0.0, []
    for _ in range(8):
        begun_s = now
        while breakers.avoided(now):
            now += 0.5
        waits.append(now - begun_s)
        breakers.chosen("d0", now)
        breakers.failed("d0", now)
    assert waits == [min(BACKOFF_S * 2**power, MOST_BACKOFF_S) for power in range(8)]


def test_failures_of_what_was_under_way_prolong_nothing() -> None:
    breakers = opened(0.0)
    breakers.failed("d0", 0.9)
    assert breakers.avoided(BACKOFF_S) == frozenset()


def test_of_too_many_places_the_oldest_failures_are_forgotten() -> None:
    breakers = opened()
    for number in range(MOST_PLACES):
        breakers.failed(f"other-{number}", 0.0)
    assert not breakers.avoided(0.0)
    assert len(breakers._breakers) == MOST_PLACES


def test_in_any_walk_none_is_avoided_for_ever_and_a_success_clears_it() -> None:
    rng = random.Random(1)
    breakers, avoided = Breakers(), 0
    for step in range(5000):
        now, place = step * 0.3, rng.choice("ab")
        match rng.randrange(4):
            case 0 | 1:
                breakers.failed(place, now)
            case 2:
                breakers.chosen(place, now)
            case 3 if rng.random() < 0.3:
                breakers.succeeded(place)
                assert place not in breakers.avoided(now)
        avoided += len(breakers.avoided(now))
        assert len(breakers.avoided(now)) <= breakers.num_open <= 2
        assert not breakers.avoided(now + MOST_BACKOFF_S)
    assert avoided > 1000
