"""Interactive before batch, batch not for ever after; a full queue turns away whoever has least right to be there."""

from __future__ import annotations

from collections import Counter

import pytest

from core.errors import Rejected, RejectReason
from router.admission.fair_line import Waiting
from router.admission.line import BATCH_SHARE, Line
from router.admission.policy import AdmissionPolicy, Band, QueuePolicy

AGEING_S = 30.0


def line(max_waiting: int = 1000) -> Line:
    return Line(AdmissionPolicy(queue=QueuePolicy(max_waiting=max_waiting, batch_ageing_s=AGEING_S)))


def item(
    name: str, band: Band = Band.INTERACTIVE, tenant: str = "t", cost: int = 100, arrived_s: float = 0.0
) -> Waiting:
    return Waiting(name, tenant, band, cost, arrived_s)


def test_interactive_work_goes_first_until_batch_work_is_old() -> None:
    queue = line()
    for number in range(100):
        queue.push(item(f"batch{number}", Band.BATCH))
        queue.push(item(f"chat{number}"))
    young = [queue.pop(AGEING_S - 1).band for _ in range(20)]
    assert set(young) == {Band.INTERACTIVE}
    old = Counter(queue.pop(AGEING_S).band for _ in range(72))
    assert old == {Band.BATCH: 72 // (BATCH_SHARE + 1), Band.INTERACTIVE: 72 - 72 // (BATCH_SHARE + 1)}


def test_old_batch_work_takes_its_share_in_tokens_not_in_requests() -> None:
    queue = line()
    for number in range(10):
        queue.push(item(f"batch{number}", Band.BATCH, cost=1000))
    for number in range(300):
        queue.push(item(f"chat{number}"))
    taken = [queue.pop(AGEING_S) for _ in range(250)]
    tokens = Counter({band: sum(each.cost for each in taken if each.band is band) for band in Band})
    assert tokens[Band.BATCH] / tokens[Band.INTERACTIVE] <= 1.5 / BATCH_SHARE
    assert tokens[Band.BATCH] > 0


def test_batch_work_alone_waits_for_nobody() -> None:
    queue = line()
    queue.push(item("b", Band.BATCH))
    assert queue.pop(0.0).request_id == "b"
    assert not queue


@pytest.mark.parametrize(
    ("waiting", "newcomer", "turned_away"),
    [
        ([("b1", Band.BATCH, "x"), ("c1", Band.INTERACTIVE, "y")], ("new", Band.INTERACTIVE, "y"), "b1"),
        ([("c1", Band.INTERACTIVE, "x"), ("c2", Band.INTERACTIVE, "x")], ("new", Band.INTERACTIVE, "y"), "c2"),
        ([("c1", Band.INTERACTIVE, "x"), ("c2", Band.INTERACTIVE, "y")], ("new", Band.INTERACTIVE, "y"), "new"),
        ([("c1", Band.INTERACTIVE, "x"), ("c2", Band.INTERACTIVE, "x")], ("new", Band.BATCH, "y"), "new"),
        ([("b1", Band.BATCH, "x"), ("b2", Band.BATCH, "x")], ("new", Band.BATCH, "y"), "b2"),
    ],
)
def test_a_full_queue_turns_away_the_surplus(
    waiting: list[tuple[str, Band, str]], newcomer: tuple[str, Band, str], turned_away: str
) -> None:
    queue = line(max_waiting=2)
    for each in waiting:
        assert queue.push(item(*each)) is None
    if turned_away == "new":
        with pytest.raises(Rejected) as caught:
            queue.push(item(*newcomer))
        assert caught.value.reason is RejectReason.QUEUE_FULL
    else:
        shed = queue.push(item(*newcomer))
        assert shed is not None and shed.request_id == turned_away
        assert "new" in queue
    assert turned_away not in queue and len(queue) == 2


def test_one_that_leaves_takes_its_tokens_along() -> None:
    queue = line()
    queue.push(item("a"))
    queue.push(item("b", Band.BATCH, cost=7))
    queue.remove("a")
    queue.remove("a")  # and may do so twice
    assert (len(queue), queue.backlog) == (1, 7)
    assert queue.lengths() == {Band.INTERACTIVE: 0, Band.BATCH: 1}
