"""What is out at the workers, what is predicted, and when to come back: told step by step."""

from __future__ import annotations

from typing import Any

import pytest

from core.errors import Rejected, RejectReason
from core.membership import Role, WorkerLoad, WorkerRef
from core.request import GenerateRequest, SamplingParams, StopConditions
from router.admission.admission import Admission
from router.admission.forecast import FIRST_GUESS, DrainRate, ExpectedCost
from router.admission.policy import AdmissionPolicy, BandPolicy, QueuePolicy
from router.view import ClusterView
from tests.worker_info import worker_info

AHEAD = 100


def request(name: str, num_tokens: int = 40, **fields: Any) -> GenerateRequest:
    stop = StopConditions(max_tokens=fields.pop("max_tokens", 8))
    return GenerateRequest(name, tuple(range(num_tokens)), SamplingParams(0.0), stop, **fields)


def view(*names: str) -> ClusterView:
    known = ClusterView()
    for name in names:
        ref = WorkerRef(name, "1")
        role = Role.PREFILL if name.startswith("p") else Role.DECODE
        known.register(worker_info(ref, role), now=0.0)
        known.ready(ref)
    return known


def admission(workers: ClusterView, **queue: Any) -> Admission:
    return Admission(AdmissionPolicy(queue=QueuePolicy(**queue)), workers, AHEAD)


def admitted(books: Admission, num_tokens: int = 40, now: float = 0.0) -> list[str]:
    """Those whose turn it is, each sent at once."""
    found = []
    while (request_id := books.next(now)) is not None:
        books.out.begin(num_tokens, num_tokens)
        found.append(request_id)
    return found


@pytest.mark.parametrize(
    ("workers", "num_tokens", "sent"),
    [
        ((), 40, 0),
        (("p1",), 40, 0),  # nobody decodes
        (("d1",), 40, 3),  # the third begins below the bound
        (("d1",), 10, 10),
        (("d1",), 1000, 2),  # one to compute, one next
        (("p1", "d1"), 40, 5),
    ],
)
def test_so_much_is_out_at_the_workers(workers: tuple[str, ...], num_tokens: int, sent: int) -> None:
    books = admission(view(*workers))
    for number in range(30):
        books.enter(request(f"r{number}", num_tokens), 0.0)
    assert len(admitted(books, num_tokens)) == sent


def test_a_first_token_lets_the_next_one_go() -> None:
    books = admission(view("d1"))
    for number in range(5):
        books.enter(request(f"r{number}"), 0.0)
    assert admitted(books) == ["r0", "r1", "r2"]
    books.out.end(40, 40, placed=False)
    assert admitted(books) == ["r3"]
    books.leave("r4")
    books.out.end(40, 40, placed=False)
    assert admitted(books) == []


def test_full_kv_pools_hold_requests_back_but_for_one_a_decode_worker() -> None:
    known = view("d1")
    known.workers()[0].load = WorkerLoad(free_blocks=2, used_blocks=98)
    books = admission(known)
    for number in range(10):
        books.enter(request(f"r{number}", 20), 0.0)
    assert admitted(books, 20) == ["r0", "r1"]  # the pool's last 32 tokens are spoken for
    books.out.place(20)
    known.workers()[0].load = WorkerLoad(free_blocks=1, used_blocks=99)
    assert admitted(books, 20, now=1.0) == []
    known.workers()[0].load = WorkerLoad(free_blocks=50, used_blocks=50)
    assert admitted(books, 20, now=2.0) == ["r2", "r3", "r4"]


def test_workers_are_counted_anew_when_they_change() -> None:
    known = view()
    books = admission(known)
    books.enter(request("r"), 0.0)
    assert admitted(books) == []
    ref = WorkerRef("d1", "1")
    known.register(worker_info(ref), now=0.0)
    known.ready(ref)
    books.workers_changed()
    assert admitted(books) == ["r"]


def test_a_late_first_token_is_refused_at_once_with_the_time_to_come_back() -> None:
    known = view("d1")
    known.workers()[0].pace.seconds = 0.1
    books = admission(known, interactive=BandPolicy(max_ttft_s=20.0))
    books.enter(request("first"), 0.0)  # 4 s
    assert admitted(books) == ["first"]
    books.enter(request("second"), 0.0)  # 8 s
    books.enter(request("third"), 0.0)  # the second's 48 tokens at 10 a second, and 8 s: 12.8 s
    with pytest.raises(Rejected) as caught:
        books.enter(request("hasty"), 0.0, max_ttft_s=10.0)
    assert caught.value.reason is RejectReason.SLOW_FIRST_TOKEN
    assert caught.value.retry_after_s == pytest.approx(7.6)  # 96 tokens wait: 9.6 s, and 8 s
    with pytest.raises(Rejected):
        books.enter(request("long", num_tokens=120), 0.0)  # the operator's bound holds for all
    books.enter(request("patient", priority=1, num_tokens=120), 0.0)  # but not for batch work
    assert "hasty" not in books.line


def test_nothing_is_predicted_before_a_worker_has_shown_its_pace() -> None:
    books = admission(view("d1"))
    assert books.enter(request("r"), 0.0, max_ttft_s=1e-6) is None


def test_retry_after_is_when_the_queue_will_have_been_served() -> None:
    books = admission(view("d1"), max_waiting=3)
    for number in range(3):
        books.enter(request(f"r{number}"), 0.0)
    assert books.next(1.0) == "r0"  # 48 tokens in a second
    books.enter(request("r3"), 1.0)
    with pytest.raises(Rejected) as caught:
        books.enter(request("r4"), 1.0)
    assert caught.value.reason is RejectReason.QUEUE_FULL
    assert caught.value.retry_after_s == pytest.approx(3.0)


def test_the_drain_rate_counts_only_while_someone_waits() -> None:
    drain = DrainRate()
    drain.waiting(0.0)
    drain.served(100, 1.0)
    assert drain.tokens_per_s == 100.0
    drain.served(100, 2.0)
    drain.emptied()
    drain.waiting(50.0)  # nobody waited meanwhile
    drain.served(100, 51.0)
    assert drain.tokens_per_s == pytest.approx(100.0)
    drain.served(1, 61.0)  # a bad ten seconds
    assert 20.0 < drain.tokens_per_s < 50.0


def test_expected_output_is_what_a_tenant_has_shown_within_what_is_asked_for() -> None:
    expected = ExpectedCost()
    assert expected.of(request("r", max_tokens=8)) == 48
    assert expected.of(request("r", max_tokens=5000, num_choices=2)) == 40 + 2 * FIRST_GUESS
    for _ in range(50):
        expected.learn("brief", 10)
    assert expected.of(request("r", max_tokens=5000, tenant="brief")) == 50
    assert expected.of(request("r", max_tokens=5000)) == 40 + FIRST_GUESS
