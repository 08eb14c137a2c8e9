"""What is learnt of tenants and turns is what they do of late, and bounded."""

from __future__ import annotations

import pytest

from router.admission.fair_line import Waiting
from router.admission.forecast import MOST_TENANTS, RATE_MEMORY_S, AfterTurn, Arrivals
from router.admission.line import Line
from router.admission.policy import AdmissionPolicy, Band, BandPolicy, QueuePolicy


def test_a_tenants_rate_is_what_it_sent_of_late() -> None:
    arrivals = Arrivals()
    for second in range(100):
        arrivals.came("steady", 50, float(second))
    rate = arrivals.tokens_per_s(100.0)["steady"]
    assert 45 < rate < 55
    assert arrivals.tokens_per_s(100.0 + 10 * RATE_MEMORY_S)["steady"] < 0.01


def test_tenants_are_bounded_and_who_asks_stays() -> None:
    arrivals = Arrivals()
    for number in range(3 * MOST_TENANTS):
        arrivals.came("asks", 1, float(number))
        arrivals.came(f"t{number}", 1, float(number))
    assert len(arrivals.tokens_per_s(0.0)) == MOST_TENANTS
    assert "asks" in arrivals.tokens_per_s(0.0)


def test_what_follows_a_turn_is_learnt_once_for_each_request_and_nothing_stays_of_it() -> None:
    after = AfterTurn()
    for number in range(100):
        after.turn(f"r{number}", ahead_s=1.0, now=0.0)
        after.first_token(f"r{number}", own_s=0.5, now=2.0)
        after.first_token(f"r{number}", own_s=0.5, now=100.0)  # it went on elsewhere
        after.turn(f"left{number}", ahead_s=1.0, now=0.0)
        after.leave(f"left{number}")
    assert after.extra_s == pytest.approx(0.5, rel=0.01)
    assert after._turns == {}


def test_batch_work_waits_for_interactive_work_that_will_come() -> None:
    line = Line(AdmissionPolicy())

    def item(name: str, band: Band, now: float) -> Waiting:
        return Waiting(name, "t", band, 100, now)

    newcomer = item("new", Band.BATCH, 100.0)
    line.push(item("due", Band.INTERACTIVE, 99.9))
    alone_s = line.wait_s(newcomer, tokens_per_s=50.0)
    for second in range(100):  # 20 tokens/s, served at once
        line.push(Waiting(f"r{second}", "t", Band.INTERACTIVE, 20, float(second)))
        line.remove(f"r{second}")
    assert 2.0 <= alone_s < 3.0
    assert line.wait_s(newcomer, tokens_per_s=50.0) > 1.3 * alone_s


def burst(max_wait_s: float) -> Line:
    """A hundred requests of 100 tokens each that came at 0."""
    line = Line(AdmissionPolicy(queue=QueuePolicy(interactive=BandPolicy(max_wait_s=max_wait_s))))
    for number in range(100):
        line.push(Waiting(f"r{number}", "t", Band.INTERACTIVE, 100, 0.0))
    return line


def test_who_will_have_left_before_its_turn_is_not_waited_for() -> None:
    """Ten are served in a second: after 6 s of patience sixty have been, and forty have gone."""
    newcomer = Waiting("new", "t", Band.INTERACTIVE, 100, 5.0)
    rate = 1000.0
    patient, hasty = burst(max_wait_s=30.0), burst(max_wait_s=6.0)
    for line in (patient, hasty):
        for _ in range(50):
            line.pop(5.0)
    assert patient.wait_s(newcomer, rate) == pytest.approx(5.0, rel=0.2)  # the other fifty
    assert hasty.wait_s(newcomer, rate) == pytest.approx(1.0, rel=0.2)
    other = Waiting("other", "u", Band.INTERACTIVE, 100, 5.0)
    assert hasty.wait_s(other, rate) == pytest.approx(0.1, rel=0.5)  # takes its tenant's turn
