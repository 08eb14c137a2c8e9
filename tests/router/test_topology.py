"""Pairs of one NVLink domain, then of one host, before others: until a probe has measured them, and among equals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.membership import Role, WorkerRef
from core.messages import PeerConnected
from core.request import Placement
from router.policy.topology import Nearness, nearness
from router.policy.transfer import FIRST_SHARE
from tests.router.test_choose import BLOCK_BYTES, NUM_TOKENS, Cluster
from tests.worker_info import worker_info

HERE = worker_info(WorkerRef("w", "1"), Role.PREFILL, address="10.0.0.1:1", nvlink_domain="nvl-0")


@pytest.mark.parametrize(
    ("domain", "address", "expected"),
    [
        ("nvl-0", "10.0.0.2:1", Nearness.NVLINK),
        ("nvl-1", "10.0.0.2:1", Nearness.FAR),
        ("", "10.0.0.2:1", Nearness.FAR),
        ("nvl-1", "10.0.0.1:2", Nearness.HOST),
        ("", "10.0.0.1:2", Nearness.HOST),
        ("nvl-1", "", Nearness.FAR),
    ],
)
def test_what_workers_say_tells_how_near_they_are(domain: str, address: str, expected: Nearness) -> None:
    other = replace(HERE, nvlink_domain=domain, address=address)
    assert nearness(HERE, other) is nearness(other, HERE) is expected


def test_what_is_not_stated_is_not_shared() -> None:
    silent = replace(HERE, nvlink_domain="", address="")
    assert nearness(silent, silent) is Nearness.FAR
    assert nearness(HERE, HERE) is Nearness.NVLINK  # the control


def placed(gbps: float, **places: tuple[str, str]) -> Cluster:
    """Workers by name, each with its NVLink domain and its host."""
    cluster = Cluster()
    for name, (domain, host) in places.items():
        role = Role.PREFILL if name[0] == "p" else Role.DECODE
        ref = cluster.refs[name] = WorkerRef(name, "1")
        address = f"{host}:1" if host else ""
        info = worker_info(ref, role, address=address, block_bytes=BLOCK_BYTES, num_blocks=1000, nvlink_domain=domain)
        cluster.view.register(info, now=0.0)
        cluster.view.ready(ref)
    for one in places:
        for other in places:
            if one != other:
                cluster.link(one, other, gbps)
    return cluster


@pytest.mark.parametrize(
    ("near", "far"),
    [
        (("nvl-0", "b"), ("nvl-1", "b")),  # one domain over two hosts
        (("nvl-0", "b"), ("", "a")),  # sooner than another GPU of the same host
        (("", "a"), ("", "b")),
        (("nvl-1", "a"), ("", "b")),
    ],
)
@pytest.mark.parametrize("learnt", [False, True])
def test_an_unmeasured_pair_is_chosen_by_where_it_is(near: tuple[str, str], far: tuple[str, str], learnt: bool) -> None:
    for places in ({"p0": far, "p1": near}, {"p1": near, "p0": far}):
        cluster = placed(0.0, d0=("nvl-0", "a"), **places)
        if learnt:
            cluster.pace("p0", 0.001)
        assert cluster.chosen(Placement.REMOTE) == "p1>d0"


def test_without_a_domain_of_both_the_first_is_chosen() -> None:
    """The control: of workers that are equally far, or of which one has not said where it is."""
    for domains in (("nvl-1", "nvl-2"), ("nvl-1", "")):
        cluster = placed(0.0, d0=("nvl-0", "a"), p0=(domains[0], "b"), p1=(domains[1], "c"))
        assert cluster.chosen(Placement.REMOTE) == "p0>d0"
    cluster = placed(0.0, d0=("", ""), p0=("nvl-1", "b"), p1=("", ""))
    assert cluster.chosen(Placement.REMOTE) == "p0>d0"


def test_what_a_probe_has_measured_counts_more_than_where_workers_are() -> None:
    cluster = placed(0.0, d0=("nvl-0", "a"), p0=("", "b"), p1=("nvl-0", "b"))
    cluster.pace("p0", 0.001)
    assert cluster.chosen(Placement.REMOTE) == "p1>d0"
    for one, other in (("p1", "d0"), ("d0", "p1")):
        cluster.link(one, other, 0.1)  # no NVLink, whatever its label says
    assert cluster.chosen(Placement.REMOTE) == "p0>d0"


def test_hand_offs_correct_what_was_assumed() -> None:
    """A hand-off over an unmeasured path is waited for ten times as long as assumed."""
    cluster = placed(0.0, d0=("", "a"), p0=("", "a"), p1=("", "b"))
    cluster.pace("p0", 0.001)
    for name, gbps in (("p1", 2.0), ("d0", 2.0)):
        other = cluster.refs["d0" if name == "p1" else "p1"]
        cluster.view.connected(cluster.refs[name], PeerConnected(other, "network", gbps))
    assert cluster.chosen(Placement.REMOTE) == "p0>d0"
    for second in range(20):
        cluster.view.learn_transfer(cluster.refs["d0"], cluster.refs["p0"], 10**9, 1.0, float(second))
        cluster.view.learn_transfer(cluster.refs["d0"], cluster.refs["p1"], 10**9, 0.25, float(second))
    assert cluster.chosen(Placement.REMOTE, now=20.0, stale_after_s=60.0) == "p1>d0"


def test_load_counts_more_than_where_workers_are() -> None:
    cluster = placed(0.0, d0=("nvl-0", "a"), p0=("", "b"), p1=("nvl-0", "b"))
    cluster.pace("p0", 0.001)
    cluster.load("p1", 2 * NUM_TOKENS)
    assert cluster.chosen(Placement.REMOTE) == "p0>d0"


def test_the_scores_that_are_recorded_name_it() -> None:
    cluster = placed(0.0, d0=("nvl-0", "a"), p0=("nvl-0", "b"))
    cluster.pace("p0", 0.001)
    remote, local = cluster.plan().scores
    assert remote.transfer == pytest.approx(21 * BLOCK_BYTES / 100e9 / 0.001 * FIRST_SHARE)
    assert f"+ transfer {remote.transfer:.0f} (nvlink) +" in str(remote)
    assert local.path is None and "+ transfer 0 +" in str(local)


def test_of_many_workers_the_near_ones_are_looked_at() -> None:
    """None of a hundred domains has both its workers among the least loaded of their roles."""
    places = {f"{role}{number}": (f"nvl-{number}", "") for number in range(100) for role in "pd"}
    cluster = placed(0.0, **places)
    cluster.pace("p0", 0.001)
    for number in range(100):
        cluster.load(f"p{number}", number // 12)
        cluster.load(f"d{number}", 10 * (99 - number))
    plan = cluster.plan(Placement.REMOTE)
    assert plan.scores[0].path is Nearness.NVLINK
    far = placed(0.0, **{name: (f"{domain}-{name}", "") for name, (domain, _) in places.items()})
    assert far.plan(Placement.REMOTE).scores[0].path is Nearness.FAR  # the control
