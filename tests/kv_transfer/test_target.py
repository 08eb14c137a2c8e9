"""What the random walks of tests/simulation/ do not name: a target's dealings with the dead."""

from __future__ import annotations

import pytest

from core.membership import WorkerRef
from engine.block_pool import BlockPool
from kv_transfer.effects import LeaseConfig, TargetFailed
from kv_transfer.target import TargetSide

LEASE = LeaseConfig(lease_s=10.0, settle_s=1.0)
ME, SOURCE, OTHER = WorkerRef("decode-0", "a"), WorkerRef("prefill-0", "b"), WorkerRef("prefill-0", "c")


@pytest.mark.parametrize(("source", "ends"), [(SOURCE, True), (OTHER, False)])
def test_a_reserve_that_names_a_source_known_to_be_dead_ends_and_frees(source: WorkerRef, ends: bool) -> None:
    """Its router may not know yet, and no second death notice will come; the next life of the place is another one."""
    pool = BlockPool(4)
    target = TargetSide(ME, pool, LEASE)
    target.peer_dead(SOURCE, 0.0)
    target.reserve("h", source, 0, tuple(pool.allocate(2) or ()), 5.0)
    failed = any(isinstance(effect, TargetFailed) for effect in target.tick(5.1))
    assert failed is ends
    assert pool.num_quarantined == (2 if ends else 0)
    target.tick(6.1)
    assert pool.num_quarantined == 0
    assert pool.num_free == (4 if ends else 2)
