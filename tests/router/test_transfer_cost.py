"""What hand-offs have shown of their lanes, and which pairs are chosen by that."""

from __future__ import annotations

import pytest

from core.messages import PeerConnected
from core.request import FinishReason, Placement, TokenDelta, WorkUsage
from router.policy.transfer import FIRST_SHARE, MEMORY_S, MOST_LANES, MOST_SHARE, ExposedShares
from tests.router import test_choose
from tests.router.test_dispatcher import Cluster, delta

GB = 10**9


def test_the_share_goes_to_what_hand_offs_show_and_back_when_they_end() -> None:
    shares = ExposedShares()
    assert shares.by_lane(0.0) == {}
    for second in range(50):
        shares.learn("lane", taken_s=0.1, exposed_s=0.02, now=float(second))
    known = shares.by_lane(50.0)["lane"]
    assert 0.2 < known < 0.25
    assert known < shares.by_lane(50.0 + MEMORY_S)["lane"] < FIRST_SHARE
    assert shares.by_lane(50.0 + 20 * MEMORY_S)["lane"] == pytest.approx(FIRST_SHARE, rel=1e-3)
    for second in range(20):
        shares.learn("lane", taken_s=0.1, exposed_s=0.3, now=50.0 + second)
    assert 2.0 < shares.by_lane(70.0)["lane"] < 3.0


def test_one_hand_off_does_not_decide_and_none_is_believed_beyond_a_bound() -> None:
    shares = ExposedShares()
    shares.learn("lane", taken_s=0.001, exposed_s=1000.0, now=0.0)
    assert shares.by_lane(0.0)["lane"] <= (MOST_SHARE + FIRST_SHARE) / 2
    shares.learn("nothing", taken_s=0.0, exposed_s=1.0, now=0.0)
    assert "nothing" not in shares.by_lane(0.0)


def test_lanes_are_bounded_and_the_one_in_use_stays() -> None:
    shares = ExposedShares()
    for number in range(10 * MOST_LANES):
        shares.learn("used", 0.1, 0.1, float(number))
        shares.learn(f"lane{number}", 0.1, 0.1, float(number))
    assert len(shares.by_lane(1000.0)) == MOST_LANES and "used" in shares.by_lane(1000.0)


def hand_off(cluster: Cluster, prefilled_s: float, first_s: float, second_s: float, kv_bytes: int = GB // 100) -> None:
    """One request; its path moves 1 GB/s."""
    effects = cluster.submit(placement=Placement.REMOTE)
    attempt = effects[0].attempt_id  # type: ignore[union-attr]
    cluster.reserved(attempt)
    cluster.say("p1", delta(0, 1, attempt=attempt), now=prefilled_s)
    usage = WorkUsage(kv_blocks_received=1, kv_bytes_received=kv_bytes)
    cluster.say("d1", TokenDelta(attempt, 1, (2,), usage=usage), now=first_s)
    cluster.say("d1", delta(2, 3, attempt=attempt, finish=FinishReason.LENGTH), now=second_s)
    cluster.assert_idle()


def share(cluster: Cluster, now: float) -> float | None:
    return cluster.view.exposed.by_lane(now).get("cma")


def test_what_the_first_token_took_longer_than_the_second_was_waited_for() -> None:
    """10 MB in 10 ms by the probe; a step takes 20 ms."""
    quick, slow = Cluster("p1", "d1"), Cluster("p1", "d1")
    for second in range(20):
        hand_off(quick, second, second + 0.020, second + 0.040)
        hand_off(slow, second, second + 0.050, second + 0.070)
    assert share(quick, 20.0) == pytest.approx(0.0, abs=0.1)
    assert share(slow, 20.0) == pytest.approx(3.0, abs=0.3)


def test_nothing_is_learnt_where_nothing_had_to_move() -> None:
    cluster = Cluster("p1", "d1")
    hand_off(cluster, 0.0, 1.0, 1.1, kv_bytes=0)
    assert share(cluster, 1.1) is None


def test_a_pair_on_one_host_is_preferred_when_it_pays() -> None:
    cluster = test_choose.Cluster("p0", "p1", "d0")
    for one, other in (("p0", "d0"), ("d0", "p0")):
        cluster.view.connected(cluster.refs[one], PeerConnected(cluster.refs[other], "network", 1.0))
    cluster.pace("p0", 0.001)
    cluster.pace("p1", 0.001)
    assert cluster.chosen(Placement.REMOTE) == "p0>d0"  # equal so far: the first
    for second in range(20):
        cluster.view.exposed.learn("network", 0.02, 0.08, float(second))
        cluster.view.exposed.learn("lane", 0.02, 0.002, float(second))
    assert cluster.chosen(Placement.REMOTE, now=20.0, stale_after_s=60.0) == "p1>d0"
    cluster.load("p1", 500, now=20.0)
    assert cluster.chosen(Placement.REMOTE, now=20.0, stale_after_s=60.0) == "p0>d0"  # it has too much to do
    cluster.load("p1", 0, now=20.0)
    later_s = 20.0 + 1000 * MEMORY_S
    for name in ("p0", "p1", "d0"):
        cluster.load(name, 0, now=later_s)
    assert cluster.chosen(Placement.REMOTE, now=later_s) == "p0>d0"  # forgotten
