"""What a worker's prompts have shown of it, and for how long that decides where the next ones go."""

from __future__ import annotations

import pytest

from core.membership import Role
from core.request import Placement
from router.admission.room import Capacity
from router.policy import pace
from router.policy.pace import MEMORY_S, Pace, Paces
from router.worker_view import WorkerView
from tests.router.test_choose import NUM_TOKENS, Cluster

FAST_S, SLOW_S = 0.001, 0.016  # of a prompt token


class Two(Cluster):
    """p0 was slow once, or is; p1 has shown for long what is usual, and has two prompts of others to compute."""

    def __init__(self) -> None:
        super().__init__("p0", "p1", "d0")
        self.now = 0.0
        for name in (*["p1"] * 20, "p0", *["p1"] * 10):
            self.show(name, SLOW_S if name == "p0" else FAST_S)

    def show(self, name: str, seconds: float) -> None:
        """A prompt of 1,000 tokens that it got when it was idle."""
        begun_s = self.now
        self.now += 1000 * seconds
        self.view.learn_pace(self.refs[name], begun_s, self.now, 1000)

    def prefiller(self) -> str:
        for name, tokens in (("p0", 0), ("p1", 2 * NUM_TOKENS), ("d0", 0)):
            self.load(name, tokens, self.now)
        return self.chosen(Placement.REMOTE, now=self.now).partition(">")[0]

    def slowness(self, name: str) -> float:
        worker = self.view.get(self.refs[name])
        assert worker is not None and self.view.paces.usual is not None
        return pace_of(self, worker, self.now) / self.view.paces.usual


def pace_of(cluster: Cluster, worker: WorkerView, now: float) -> float:
    return worker.pace.at(now, cluster.view.paces.of_role(worker.info.role, now)) or 0.0


def test_a_worker_that_was_slow_once_gets_work_again() -> None:
    cluster = Two()
    started_s = cluster.now
    assert cluster.prefiller() == "p1" and cluster.slowness("p0") > 5
    while cluster.prefiller() == "p1":
        cluster.now += 1.0
        assert cluster.now < started_s + 2 * MEMORY_S
    assert cluster.now > started_s + MEMORY_S / 3
    cluster.show("p0", FAST_S)  # it has recovered
    assert cluster.slowness("p0") < 1.3
    assert cluster.prefiller() == "p0"


def test_a_worker_that_is_slow_stays_mostly_avoided() -> None:
    cluster, tried = Two(), 0
    requests = 1200
    for _ in range(requests):
        cluster.now += 1.0
        name = cluster.prefiller()
        tried += name == "p0"
        cluster.show(name, SLOW_S if name == "p0" else FAST_S)
    assert 5 < tried < 0.05 * requests


def test_one_whose_peers_are_slow_too_is_no_better_than_they_are() -> None:
    """A prompt costs more beside decodes: the prefill workers' pace says nothing of a decode worker."""
    cluster = Cluster("p0", "d0", "d1")
    for second in range(0, 100, 5):
        cluster.view.learn_pace(cluster.refs["p0"], second, second + 1, 1000)
        cluster.view.learn_pace(cluster.refs["d0"], second, second + 5, 1000)
    cluster.view.learn_pace(cluster.refs["d1"], 70.0, 100.0, 1000)
    d1, usual = cluster.view.get(cluster.refs["d1"]), cluster.view.paces.usual
    assert d1 is not None and usual is not None
    assert pace_of(cluster, d1, 100.0) == pytest.approx(0.03, rel=0.1)
    for second in range(100, 400, 5):
        cluster.view.learn_pace(cluster.refs["d0"], second, second + 5, 1000)
    assert pace_of(cluster, d1, 400.0) == pytest.approx(0.005, rel=0.1)


def test_one_without_peers_of_its_role_becomes_like_all() -> None:
    paces, alone, usual = Paces(), Pace(), Pace()
    paces.learn(alone, Role.DECODE, SLOW_S, 0.0)
    for second in range(300):
        paces.learn(usual, Role.PREFILL, FAST_S, float(second))
    assert alone.at(0.0, paces.of_role(Role.DECODE, 0.0)) == pytest.approx(SLOW_S)
    late_s = 5 * MEMORY_S
    assert alone.at(late_s, paces.of_role(Role.DECODE, late_s)) == pytest.approx(FAST_S, rel=0.05)
    assert Pace().at(300.0, paces.of_role(Role.PREFILL, 300.0)) == pytest.approx(FAST_S)  # has shown nothing


def test_predictions_forget_a_slow_worker_too() -> None:
    cluster = Two()
    slow = Capacity.count(cluster.view, cluster.now).seconds_per_token
    later = Capacity.count(cluster.view, cluster.now + 5 * MEMORY_S).seconds_per_token
    assert slow is not None and slow > 3 * FAST_S
    assert later is not None and later < 1.6 * FAST_S


def test_without_fading_it_would_never_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "MEMORY_S", 1e12)
    cluster = Two()
    cluster.now += 3600.0
    assert cluster.prefiller() == "p1"
