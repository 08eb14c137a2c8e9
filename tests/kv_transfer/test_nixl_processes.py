"""Faults of NIXL peers in other processes, over CMA and over TCP. Each runs as a process with a hard limit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from nixl_scenarios import SCENARIOS

ROOT = Path(__file__).parents[2]
LIMIT_S = 25.0
# Over CMA the sender copies: a frozen target cannot stop it, and no network is in between.
TCP_ONLY = {"freeze_and_thaw", "close_under_freeze", "black_hole"}
CMA_ONLY = {"freeze_over_cma"}
IN_A_NETWORK_OF_ITS_OWN = [
    "unshare",
    "--map-root-user",
    "--net",
    "--mount",
]  # where user namespaces are allowed, or as root

Case = tuple[str, str]  # lane, scenario
Run = Future[subprocess.CompletedProcess[str]]

CASES = [("tcp", name) for name in SCENARIOS if name not in CMA_ONLY]
CASES += [("cma", name) for name in SCENARIOS if name not in TCP_ONLY]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[dict[Case, Run]]:
    """Those that were asked for, two at a time: half of each is waiting."""
    asked: list[Any] = [item for item in request.session.items if item.path == request.path]
    cases = [(item.callspec.params["lane"], item.callspec.params["scenario"]) for item in asked]
    with ThreadPoolExecutor(2) as pool:
        yield {case: pool.submit(run_case, *case) for case in cases}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize(("lane", "scenario"), CASES)
def test_scenario(lane: str, scenario: str, runs: dict[Case, Run]) -> None:
    ended = runs[lane, scenario].result()
    assert ended.returncode == 0, ended.stdout + ended.stderr


def run_case(lane: str, scenario: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'proto/python'}"}
    environment.pop("UCX_TLS", None)
    if lane == "tcp":
        environment["UCX_TLS"] = "tcp"
    if scenario == "black_hole":
        environment["UCX_TCP_USER_TIMEOUT"] = "2s"
    around = IN_A_NETWORK_OF_ITS_OWN if scenario == "black_hole" else []
    return subprocess.run(
        [*around, sys.executable, str(Path(__file__).with_name("nixl_scenarios.py")), scenario],
        env=environment, timeout=LIMIT_S, capture_output=True, text=True, check=False,
    )  # fmt: skip
