"""What the dispatcher does with the line: bounded work at the workers, turns, and never a word against what runs."""

from __future__ import annotations

from typing import Any

import pytest

from core.errors import Rejected, RejectReason
from core.membership import WorkerLoad, WorkerRef
from core.messages import StartGeneration, StepOutput
from core.request import FinishReason, GenerateRequest, Placement, SamplingParams, StopConditions, TokenDelta
from router.admission.policy import AdmissionPolicy, BandPolicy, QueuePolicy
from router.config import DispatcherConfig
from router.dispatcher import Dispatcher
from router.effects import Effect, Fail, Send
from router.view import ClusterView
from tests.worker_info import worker_info

WORKERS = (WorkerRef("d1", "1"), WorkerRef("d2", "1"))


class Cluster:
    """Decode workers alone, of which each takes two prompts of 100 tokens, and a dispatcher over them."""

    def __init__(self, num_workers: int = 1, **queue: Any) -> None:
        self.view = ClusterView()
        self.dispatcher = Dispatcher(DispatcherConfig(tokens_ahead=200), self.view, "x")
        self.dispatcher.admission.policy = AdmissionPolicy(queue=QueuePolicy(**queue))
        for ref in WORKERS[:num_workers]:
            self.view.register(worker_info(ref), now=0.0)
            self.view.ready(ref)
        self.dispatcher.serve_queue(0.0)
        self.attempts: dict[str, str] = {}  # of each request, the latest
        self.failed: dict[str, Exception] = {}

    def submit(
        self, name: str, tenant: str = "", priority: int = 0, now: float = 0.0, prompt_tokens: int = 100
    ) -> list[str]:
        prompt, stop = tuple(range(prompt_tokens)), StopConditions(max_tokens=8)
        request = GenerateRequest(name, prompt, SamplingParams(0.0), stop, tenant=tenant, priority=priority)
        return self.sent(self.dispatcher.submit(request, Placement.AUTO, now))

    def first_token(self, name: str, finish: FinishReason | None = None, now: float = 0.0) -> list[str]:
        delta = TokenDelta(self.attempts[name], 0, (5,), finish)
        return self.sent(self.dispatcher.answered(WORKERS[0], StepOutput((delta,), WorkerLoad()), now))

    def sent(self, effects: list[Effect]) -> list[str]:
        """The requests that went to a worker, in order."""
        names = []
        for effect in effects:
            match effect:
                case Send(_, StartGeneration(request)):
                    name = request.request_id.partition("#")[0]
                    self.attempts[name] = request.request_id
                    names.append(name)
                case Fail(request_id, error):
                    self.failed[request_id] = error
        return names


def test_what_is_over_the_bound_waits_and_goes_in_turns() -> None:
    cluster = Cluster()
    sent = [cluster.submit(f"a{number}", "a") for number in range(5)]
    assert sent == [["a0"], ["a1"], [], [], []]
    assert cluster.submit("b0", "b") == []
    assert cluster.dispatcher.num_queued == 4
    order = cluster.first_token("a0") + cluster.first_token("a1") + cluster.sent(cluster.dispatcher.cancel("a0", 0.0))
    assert "b0" in order and len(order) == 2  # its turn comes before those of `a` that wait since before


def test_one_that_goes_on_elsewhere_asks_for_no_room_and_goes_first() -> None:
    cluster = Cluster(num_workers=2)
    for number in range(8):
        cluster.submit(f"r{number}")
    assert sorted(cluster.attempts) == ["r0", "r1", "r2", "r3"]
    on_first = sorted(
        name for name, attempt in cluster.attempts.items()
        if cluster.dispatcher._books.attempts[attempt].plan.decode == WORKERS[0]  # type: ignore[union-attr]
    )  # fmt: skip
    cluster.first_token(on_first[0])
    again = cluster.sent(cluster.dispatcher.worker_lost(WORKERS[0], 1.0))
    assert sorted(again)[: len(on_first)] == on_first  # both, although the bound is for less now
    assert cluster.failed == {}


def test_a_full_queue_sheds_and_says_when_to_come_back() -> None:
    cluster = Cluster(max_waiting=2)
    for name in ("r0", "r1", "batch0"):
        cluster.submit(name, priority=name.startswith("batch"))
    cluster.submit("r2")
    cluster.submit("r3")
    error = cluster.failed.pop("batch0")
    assert isinstance(error, Rejected) and error.reason is RejectReason.SHED
    with pytest.raises(Rejected) as caught:
        cluster.submit("r4")
    assert caught.value.reason is RejectReason.QUEUE_FULL
    assert cluster.failed == {} and cluster.dispatcher.num_open == 4


@pytest.mark.parametrize(("num_workers", "reason"), [(1, RejectReason.QUEUE_TIMEOUT), (0, RejectReason.NO_WORKER)])
def test_who_waits_too_long_is_told_for_what(num_workers: int, reason: RejectReason) -> None:
    cluster = Cluster(num_workers, interactive=BandPolicy(max_wait_s=5.0), batch=BandPolicy(max_wait_s=50.0))
    for number in range(3):
        cluster.submit(f"r{number}")
    cluster.submit("batch", priority=1)
    cluster.sent(cluster.dispatcher.tick(4.9))
    assert cluster.failed == {}
    cluster.sent(cluster.dispatcher.tick(5.0))
    assert {error.reason for error in cluster.failed.values() if isinstance(error, Rejected)} == {reason}
    assert "batch" not in cluster.failed and "r2" in cluster.failed
    cluster.sent(cluster.dispatcher.tick(50.0))
    assert "batch" in cluster.failed


def test_prompts_that_end_in_one_step_of_a_new_worker_break_no_prediction() -> None:
    """The second took no time, as far as one can see: a pace of 0 predicts nothing, and divides nothing."""
    cluster = Cluster(num_workers=1)
    cluster.submit("short", prompt_tokens=20)  # too short to tell of the pace
    cluster.submit("long")
    deltas = tuple(TokenDelta(cluster.attempts[name], 0, (5,), FinishReason.STOP) for name in ("short", "long"))
    cluster.sent(cluster.dispatcher.answered(WORKERS[0], StepOutput(deltas, WorkerLoad()), 1.0))
    assert cluster.view.workers()[0].pace.seconds == 0.0
    cluster.dispatcher.admission.policy = AdmissionPolicy(queue=QueuePolicy(interactive=BandPolicy(max_ttft_s=1.0)))
    assert cluster.submit("next", now=1.1) == ["next"]
    cluster.first_token("next", now=11.1)  # 20 s for 100 tokens, in the mean
    with pytest.raises(Rejected, match="slow_first_token"):
        cluster.submit("late", now=11.2)


def test_what_ends_by_itself_is_what_is_expected_of_the_next() -> None:
    cluster = Cluster()
    cluster.submit("r0", "t")
    cluster.first_token("r0", FinishReason.STOP)
    stop = StopConditions(max_tokens=500)
    request = GenerateRequest("r", tuple(range(100)), SamplingParams(0.0), stop, tenant="t")
    assert cluster.dispatcher.admission.expected.of(request) == 101
