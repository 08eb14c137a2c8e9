"""How many requests were served as promised, under the targets that the operator gives."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Gauge


class Objective(StrEnum):
    """What is promised of a request."""

    TTFT = "ttft"  # its first token within the target
    TPOT = "tpot"  # each of its outputs, on average, within the target for gaps between tokens
    ALL = "all"  # both, and that it does not fail: goodput


@dataclass(frozen=True, slots=True)
class SloTargets:
    """ttft_s: arrival to first token. itl_s: a gap between tokens."""

    ttft_s: float
    itl_s: float


class SloMetrics:
    """One router's. bands: what requests are counted apart by, all of them."""

    def __init__(self, registry: CollectorRegistry, targets: SloTargets, bands: tuple[str, ...]) -> None:
        self.targets = targets
        target_s = Gauge("tandem_slo_target_seconds", "What is promised.", ["objective"], registry=registry)
        target_s.labels(Objective.TTFT).set(targets.ttft_s)
        target_s.labels(Objective.TPOT).set(targets.itl_s)
        labels = ["objective", "band", "attained"]
        requests = Counter("tandem_slo_requests_total", "Requests by what was kept.", labels, registry=registry)
        gaps = Counter("tandem_slo_gaps_total", "Gaps between tokens by target.", labels[1:], registry=registry)
        both = (False, True)
        self._gaps = {(band, kept): gaps.labels(band, _text(kept)) for band in bands for kept in both}
        self._requests = {
            (objective, band, kept): requests.labels(objective, band, _text(kept))
            for objective in Objective
            for band in bands
            for kept in both
        }

    def gap(self, band: str, gap_s: float) -> None:
        """Count a gap between the tokens of an output."""
        self._gaps[band, gap_s <= self.targets.itl_s].inc()

    def ended(self, band: str, ttft_s: float, tpots_s: list[float], *, failed: bool) -> None:
        """Count a request.

        ttft_s: of one that ended without a token: inf where it was ours to send one, else how long it waited.
        tpots_s: of its outputs, as far as they have more than one token. failed: it did not end well, by our doing.
        """
        in_time, fluent = ttft_s <= self.targets.ttft_s, max(tpots_s, default=0.0) <= self.targets.itl_s
        self._requests[Objective.TTFT, band, in_time].inc()
        self._requests[Objective.ALL, band, in_time and fluent and not failed].inc()
        if tpots_s:
            self._requests[Objective.TPOT, band, fluent].inc()


def _text(kept: bool) -> str:
    return "true" if kept else "false"
