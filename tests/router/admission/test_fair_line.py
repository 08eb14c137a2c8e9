"""Tenants get tokens by weight, whatever they send; nobody starves; nothing is lost or counted twice."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.admission.fair_line import MOST_DEBT, QUANTUM_TOKENS, FairLine, Waiting
from router.admission.policy import Band

costs = st.integers(1, 4 * QUANTUM_TOKENS)


def item(tenant: str, number: int, cost: int, arrived_s: float = 0.0) -> Waiting:
    return Waiting(f"{tenant}-{number}", tenant, Band.INTERACTIVE, cost, arrived_s)


def served_by_tenant(line: FairLine, tokens: int) -> Counter[str]:
    served: Counter[str] = Counter()
    while line and served.total() < tokens:
        taken = line.pop()
        served[taken.tenant] += taken.cost
    return served


@given(
    st.lists(costs, min_size=60, max_size=60),
    st.lists(costs, min_size=60, max_size=60),
    st.sampled_from([0.25, 1.0, 3.0]),
)
def test_tenants_that_wait_share_by_weight_within_a_quantum_and_one_request_each(
    ours: list[int], theirs: list[int], weight: float
) -> None:
    weights = {"a": 1.0, "b": weight}
    line = FairLine(weights.__getitem__)
    for number, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        line.push(item("a", number, our))
        line.push(item("b", number, their))
    served: Counter[str] = Counter()
    bound = QUANTUM_TOKENS + max(ours) + max(theirs) / weight
    left = Counter({"a": 60, "b": 60})
    while min(left.values()) > 0:  # both wait
        taken = line.pop()
        served[taken.tenant] += taken.cost
        left[taken.tenant] -= 1
        assert abs(served["a"] - served["b"] / weight) <= bound


def test_first_come_first_served_is_not_fair() -> None:
    """The control: in order of arrival, ten times as many requests get ten times the tokens."""
    line = FairLine(lambda _tenant: 1.0)
    arrivals = [item("noisy", number, 100) for number in range(100)] + [
        item("quiet", number, 100) for number in range(10)
    ]
    for each in arrivals:
        line.push(each)
    assert Counter(each.tenant for each in arrivals[:20]) == {"noisy": 20}
    assert served_by_tenant(line, 2000) == {"noisy": 1000, "quiet": 1000}


@pytest.mark.parametrize("cost", [1, QUANTUM_TOKENS, 1_000_000])
def test_a_request_of_any_size_has_its_turn(cost: int) -> None:
    line = FairLine(lambda _tenant: 0.01)
    line.push(item("large", 0, cost))
    line.push(item("large", 1, cost))
    for number in range(5):
        line.push(item("small", number, 1))
    taken = [line.pop().request_id for _ in range(7)]
    assert sorted(taken) == ["large-0", "large-1", *(f"small-{number}" for number in range(5))]
    assert taken.index("large-0") < taken.index("large-1")


@given(st.lists(st.tuples(st.sampled_from(["push", "pop", "remove"]), st.sampled_from("abc"), costs), max_size=80))
def test_nothing_is_lost_or_counted_twice(steps: list[tuple[str, str, int]]) -> None:
    line = FairLine({"a": 1.0, "b": 0.5, "c": 7.0}.__getitem__)
    inside: dict[str, Waiting] = {}
    for number, (what, tenant, cost) in enumerate(steps):
        if what == "push":
            new = item(tenant, number, cost)
            line.push(new)
            inside[new.request_id] = new
        elif what == "pop" and line:
            taken = line.pop()
            first = next(each for each in inside.values() if each.tenant == taken.tenant)
            assert inside.pop(taken.request_id) is first  # within a tenant in order
        elif what == "remove" and inside:
            line.remove(inside.pop(next(reversed(inside))))
        assert len(line) == len(inside)
        assert line.backlog == sum(each.cost for each in inside.values())
        assert line.oldest_s() == (0.0 if inside else float("inf"))
    while line:
        del inside[line.pop().request_id]
    assert inside == {}


def test_what_goes_before_a_newcomer_is_its_own_and_as_much_of_each_other() -> None:
    line = FairLine({"noisy": 1.0, "quiet": 1.0, "heavy": 2.0, "new": 1.0}.__getitem__)
    for number in range(50):
        line.push(item("noisy", number, 100))
    assert line.tokens_before("quiet", 100) == 100
    assert line.tokens_before("noisy", 100) == 5000
    line.push(item("quiet", 0, 300))
    assert line.tokens_before("quiet", 100) == 300 + 400
    assert line.tokens_before("heavy", 100) == 50 + 50
    assert line.tokens_before("heavy", 100, {"quiet": 1000.0, "new": 7.0, "heavy": 9.0}) == 50 + 50 + 7


def test_a_tenant_pays_for_what_it_got_elsewhere_and_not_for_ever() -> None:
    line = FairLine(lambda _tenant: 1.0)
    line.charge("busy", 1000)  # nothing of it waits here: nothing is owed
    for number in range(3 * MOST_DEBT):
        for tenant in ("busy", "quiet"):
            line.push(item(tenant, number, QUANTUM_TOKENS))
    assert served_by_tenant(line, 20 * QUANTUM_TOKENS)["busy"] == 10 * QUANTUM_TOKENS
    line.charge("busy", 40 * QUANTUM_TOKENS)
    assert served_by_tenant(line, 40 * QUANTUM_TOKENS)["busy"] <= QUANTUM_TOKENS
    assert served_by_tenant(line, 20 * QUANTUM_TOKENS)["busy"] >= 9 * QUANTUM_TOKENS
    line.charge("busy", 10**9)
    served_by_tenant(line, MOST_DEBT * QUANTUM_TOKENS)
    assert served_by_tenant(line, 20 * QUANTUM_TOKENS)["busy"] >= 9 * QUANTUM_TOKENS
    alone = FairLine(lambda _tenant: 1.0)
    alone.push(item("busy", 0, QUANTUM_TOKENS))
    alone.charge("busy", 1000)
    assert alone.pop().tenant == "busy"  # nobody waits for it to pay
