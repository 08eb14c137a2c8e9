"""Bucket edges of the histograms: in seconds, tokens and bytes."""

from __future__ import annotations

from typing import Final

TTFT_BUCKETS_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
# OpenTelemetry GenAI's buckets of time per output token, and a finer start for small models.
TPOT_BUCKETS_S: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
DURATION_BUCKETS_S: Final = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
STEP_BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
STAGE_BUCKETS_S: Final = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
TOKEN_BUCKETS: Final = tuple(float(4**power) for power in range(10))
BYTE_BUCKETS: Final = tuple(float(4**power) for power in range(5, 16))
