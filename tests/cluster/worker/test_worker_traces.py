"""The spans of a worker's part, made of commands, answers, steps and the ends of hand-offs."""

from __future__ import annotations

from typing import Final

from cluster.worker.traces import WorkerTraces
from core.handoff import HandoffTicket
from core.membership import WorkerRef
from core.messages import Refused, RefuseReason, ReserveBlocks, Reserved, StartGeneration, StartPrefill
from core.request import FinishReason, GenerateRequest, SamplingParams, StopConditions, TokenDelta, WorkUsage
from engine.step import Progress
from kv_transfer.effects import SourceEnded, TargetLanded
from tests.telemetry.spans import KeptSpans

TRACEPARENT: Final = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
PEER: Final = WorkerRef("decode-0", "a")
TICKET: Final = HandoffTicket("r#1", PEER, 1, 0, (5, 6))


def request(traceparent: str = TRACEPARENT) -> GenerateRequest:
    stop = StopConditions(max_tokens=4)
    return GenerateRequest("r#1", (1, 2, 3), SamplingParams(), stop, traceparent=traceparent)


def step(num_computed: int, *token_ids: int, ended: bool = False) -> list[Progress]:
    reason = FinishReason.STOP if ended else None
    deltas = (TokenDelta("r#1", 0, token_ids, reason, usage=WorkUsage(computed_tokens=3)),) if token_ids else ()
    return [Progress("r#1", num_computed, (0,), deltas, ended=ended), Progress("other", 1, (1,), ())]


class Worker:
    def __init__(self) -> None:
        self.kept = KeptSpans()
        self.tracer = self.kept.tracer(ratio=0.0)
        self.traces = WorkerTraces(self.tracer, WorkerRef("worker-0", "a"))

    def tree(self) -> list[str]:
        return self.kept.tree(self.tracer)


def test_a_prefill_worker_computes_and_hands_over() -> None:
    worker = Worker()
    worker.traces.begin(StartPrefill(request(), TICKET))
    worker.traces.stepped(step(2))
    worker.traces.stepped(step(3, 7, ended=True))
    worker.traces.handoff_ended(SourceEnded("other", landed=True))
    worker.traces.handoff_ended(SourceEnded("r#1", landed=True))
    assert worker.tree() == ["prefill worker", "  queue", "  compute", "  transfer"]
    spans = {span.name: span for span in worker.kept.spans}
    assert [event.attributes for event in spans["compute"].events] == [
        {"tandem.computed_tokens": 2}, {"tandem.computed_tokens": 3},
    ]  # fmt: skip
    assert spans["transfer"].end_time > spans["compute"].end_time
    top = spans["prefill worker"]
    assert f"{top.parent.span_id:016x}" == TRACEPARENT.split("-")[2]
    assert top.attributes["tandem.worker"] == "worker-0@a"


def test_a_hand_off_that_does_not_land_ends_all_with_why() -> None:
    worker = Worker()
    worker.traces.begin(StartPrefill(request(), TICKET))
    worker.traces.stepped(step(2))
    worker.traces.handoff_ended(SourceEnded("r#1", landed=False))
    why = "did not land"
    assert worker.tree() == [f"prefill worker !{why}", "  queue", f"  compute !{why}", f"  transfer !{why}"]


def test_a_decode_worker_receives_and_decodes() -> None:
    worker = Worker()
    worker.traces.begin(ReserveBlocks(request(), "r#1", PEER))
    worker.traces.answered(Reserved("r#1", TICKET))
    worker.traces.handoff_ended(TargetLanded("r#1", (5, 6), (7,), 2))
    worker.traces.stepped(step(4, 8))
    worker.traces.stepped(step(5, 9, ended=True))
    assert worker.tree() == ["decode worker", "  reserve", "  receive", "  decode"]
    (receive,) = [span for span in worker.kept.spans if span.name == "receive"]
    assert receive.attributes == {"tandem.num_blocks": 2}


def test_a_decode_worker_does_it_all() -> None:
    worker = Worker()
    worker.traces.begin(StartGeneration(request()))
    worker.traces.stepped(step(2))
    worker.traces.stepped(step(3, 7))
    worker.traces.stepped(step(4, 8, ended=True))
    assert worker.tree() == ["decode worker", "  queue", "  prefill", "  decode"]


def test_what_is_refused_or_cancelled_says_so_and_nothing_stays() -> None:
    worker = Worker()
    worker.traces.begin(ReserveBlocks(request(), "r#1", PEER))
    worker.traces.answered(Refused("r#1", RefuseReason.NO_BLOCKS, "no room"))
    worker.traces.begin(StartGeneration(request()))
    worker.traces.end("r#1", "cancelled")
    worker.traces.end("r#1", "cancelled")
    assert not worker.traces._open
    assert worker.tree() == [
        "decode worker !no_blocks: no room", "  reserve !no_blocks: no room",
        "decode worker !cancelled", "  queue !cancelled",
    ]  # fmt: skip


def test_what_is_not_traced_keeps_nothing() -> None:
    worker = Worker()
    for traceparent in ("", TRACEPARENT[:-2] + "00"):
        worker.traces.begin(StartGeneration(request(traceparent)))
        assert not worker.traces._open
    worker.traces.stepped(step(3, 7, ended=True))
    assert worker.tree() == []
