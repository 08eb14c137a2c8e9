"""Which requests count as served as promised."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from prometheus_client import CollectorRegistry

from core.errors import BadRequest, Rejected, RejectReason, TandemError, WorkerLost
from core.request import FinishReason, GenerateRequest, SamplingParams, StopConditions
from router.admission.policy import Band
from router.front.meter import Endpoint, Meter
from router.front.usage import Usage
from telemetry.router_metrics import RouterMetrics
from telemetry.slo_metrics import SloTargets


class Edge:
    """A meter's clock and metrics: first token in 1 s, 0.5 s between tokens."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.registry = CollectorRegistry()
        self.metrics = RouterMetrics(self.registry, "tiny", SloTargets(ttft_s=1.0, itl_s=0.5), tuple(Band))

    @contextmanager
    def request(self, priority: int = 0) -> Iterator[Meter]:
        with (
            suppress(TandemError, ConnectionError),
            Meter(self.metrics, Endpoint.GRPC, "r", lambda: self.now_s) as meter,
        ):
            stop = StopConditions(max_tokens=8)
            meter.accepted(GenerateRequest("r", (1,), SamplingParams(), stop, priority=priority))
            yield meter

    def tokens(self, meter: Meter, *after_s: float) -> None:
        for gap_s in after_s:
            self.now_s += gap_s
            meter.tokens(1, choice=0)

    def count(self, name: str, **labels: str) -> tuple[int, int]:
        """Kept, and not kept."""

        def value(attained: str) -> int:
            sample = self.registry.get_sample_value(f"tandem_slo_{name}_total", {**labels, "attained": attained})
            assert sample is not None
            return int(sample)

        return value("true"), value("false")

    def kept(self, band: str = "interactive") -> dict[str, tuple[int, int]]:
        """By objective."""
        return {item: self.count("requests", objective=item, band=band) for item in ("ttft", "tpot", "all")}


DONE = (FinishReason.STOP, Usage(1))


@pytest.mark.parametrize(
    ("after_s", "ttft", "tpot", "goodput"),
    [
        ((1.0, 0.5, 0.5), (1, 0), (1, 0), (1, 0)),
        ((1.1, 0.5, 0.5), (0, 1), (1, 0), (0, 1)),
        ((0.5, 0.6, 0.6), (1, 0), (0, 1), (0, 1)),
        ((0.5, 0.9, 0.1), (1, 0), (1, 0), (1, 0)),  # on average
        ((0.5,), (1, 0), (0, 0), (1, 0)),  # one token has no gap
    ],
)
def test_a_request_that_ends_well(
    after_s: tuple[float, ...], ttft: tuple[int, int], tpot: tuple[int, int], goodput: tuple[int, int]
) -> None:
    edge = Edge()
    with edge.request() as meter:
        edge.tokens(meter, *after_s)
        meter.finished(*DONE)
    assert edge.kept() == {"ttft": ttft, "tpot": tpot, "all": goodput}
    assert edge.kept(band="batch") == {"ttft": (0, 0), "tpot": (0, 0), "all": (0, 0)}


def test_single_gaps_are_counted_by_band() -> None:
    edge = Edge()
    with edge.request(priority=1) as meter:
        edge.tokens(meter, 5.0, 0.5, 0.9)
        meter.finished(*DONE)
    assert edge.count("gaps", band="batch") == (1, 1)
    assert edge.count("gaps", band="interactive") == (0, 0)
    assert edge.kept(band="batch")["ttft"] == (0, 1)


@pytest.mark.parametrize(
    ("error", "waited_s", "tokens", "ttft", "goodput"),
    [
        (Rejected(RejectReason.QUEUE_FULL, "full"), 0.0, 0, (0, 1), (0, 1)),
        (WorkerLost("decode-0", "died"), 0.1, 2, (1, 0), (0, 1)),
        (BadRequest("prompt", "wrong"), 0.0, 0, (0, 0), (0, 0)),
        (ConnectionResetError("left"), 0.5, 0, (0, 0), (0, 0)),  # it could still have been served in time
        (ConnectionResetError("left"), 1.5, 0, (0, 1), (0, 1)),
        (ConnectionResetError("left"), 0.1, 2, (1, 0), (1, 0)),  # it had what was promised as long as it stayed
    ],
)
def test_a_request_that_does_not(
    error: Exception, waited_s: float, tokens: int, ttft: tuple[int, int], goodput: tuple[int, int]
) -> None:
    edge = Edge()
    with edge.request() as meter:
        edge.now_s += waited_s
        edge.tokens(meter, *[0.1] * tokens)
        raise error
    kept = edge.kept()
    assert (kept["ttft"], kept["all"]) == (ttft, goodput)
