"""Permits: never more than allowed, each back once; tokens: never more than the rate, in the long run."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import InvariantBroken, Rejected, RejectReason
from router.admission.limits import LEAST_WAIT_S, MOST_WAIT_S, Permit, TenantLimits
from router.admission.policy import TenantPolicy


def limits(**policy: Any) -> TenantLimits:
    known = TenantPolicy(**policy)
    return TenantLimits(lambda tenant: known if tenant == "t" else TenantPolicy())


def reason_of(books: TenantLimits, num_tokens: int = 1, now: float = 0.0) -> tuple[RejectReason, float]:
    with pytest.raises(Rejected) as caught:
        books.take("t", num_tokens, now)
    return caught.value.reason, caught.value.retry_after_s


def test_a_permit_that_is_given_back_lets_the_next_one_in() -> None:
    books = limits(max_concurrent=2)
    first = books.take("t", 1, 0.0)
    books.take("t", 1, 0.0)
    assert reason_of(books)[0] is RejectReason.TENANT_CONCURRENCY
    books.take("other", 1, 0.0)  # another tenant's own
    books.give_back(first, 1, 4.0)
    assert books.num_open("t") == 1
    books.take("t", 1, 4.0)
    assert reason_of(books, now=4.0) == (RejectReason.TENANT_CONCURRENCY, 2.0)  # two that take 4 s each: one in 2 s
    with pytest.raises(InvariantBroken):
        books.give_back(first, 1, 5.0)


def test_tokens_come_at_their_rate() -> None:
    books = limits(tokens_per_s=10.0, burst_tokens=100)
    books.take("t", 70, 0.0)
    assert reason_of(books, 70, 0.0) == (RejectReason.TENANT_TOKENS, 4.0)
    assert reason_of(books, 70, 3.0) == (RejectReason.TENANT_TOKENS, pytest.approx(1.0))
    books.take("t", 70, 4.0)
    books.take("t", 100_000, 14.0)  # larger than the bucket: goes when that is full, and leaves it in debt
    assert reason_of(books, 1, 100.0)[0] is RejectReason.TENANT_TOKENS


def test_what_was_charged_and_not_used_comes_back_and_what_was_used_beyond_is_paid() -> None:
    books = limits(tokens_per_s=10.0, burst_tokens=100)
    books.give_back(books.take("t", 100, 0.0), 20, 0.0)
    permit = books.take("t", 80, 0.0)
    assert reason_of(books, 1)[0] is RejectReason.TENANT_TOKENS
    books.give_back(permit, 180, 0.0)
    assert reason_of(books, 1) == (RejectReason.TENANT_TOKENS, pytest.approx(10.1))


@given(
    st.lists(
        st.tuples(st.sampled_from(["take", "back"]), st.integers(1, 80), st.floats(0, 5), st.floats(0, 1)), max_size=80
    )
)
def test_limits_are_never_exceeded_and_nothing_counts_below_zero(steps: list[tuple[str, int, float, float]]) -> None:
    books = limits(max_concurrent=3, tokens_per_s=10.0, burst_tokens=100)
    held: list[Permit] = []
    now, used = 0.0, 0
    for what, num_tokens, passed_s, share in steps:
        now += passed_s
        if what == "back" and held:
            permit = held.pop(0)
            used -= permit.charged_tokens - int(share * permit.charged_tokens)
            books.give_back(permit, int(share * permit.charged_tokens), now)
        elif what == "take":
            try:
                held.append(books.take("t", num_tokens, now))
                used += num_tokens
            except Rejected as error:
                assert LEAST_WAIT_S <= error.retry_after_s <= MOST_WAIT_S
        assert books.num_open("t") == len(held) <= 3
        assert used <= 100 + 10.0 * now + 1e-6
    for permit in held:
        books.give_back(permit, 0, now)
    assert books.num_open("t") == 0 and books._open == {}


@pytest.mark.parametrize("held_s", [0.0, 1e-9, 1e12])
def test_whoever_is_refused_is_told_a_time_that_can_be_waited(held_s: float) -> None:
    """Also where requests took no time, and where a tenant has more debt than it will pay off in a year."""
    books = limits(max_concurrent=1)
    books.give_back(books.take("t", 1, 0.0), 1, held_s)
    books.take("t", 1, held_s)
    assert LEAST_WAIT_S <= reason_of(books, now=held_s)[1] <= MOST_WAIT_S
    slow = limits(tokens_per_s=0.001, burst_tokens=1)
    slow.give_back(slow.take("t", 1, 0.0), 10**9, 0.0)
    assert reason_of(slow) == (RejectReason.TENANT_TOKENS, MOST_WAIT_S)


def test_a_tenant_without_limits_has_none() -> None:
    books = limits()
    assert len({books.take("t", 10**9, 0.0) for _ in range(100)}) == 100
