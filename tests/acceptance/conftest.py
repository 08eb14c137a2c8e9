"""Clusters that several acceptance tests share; each is started once, and only when a test needs it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.running_cluster import RunningCluster, running_cluster


@pytest.fixture(scope="package")
def pair(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """One prefill and one decode worker, as `make serve` starts them."""
    with running_cluster(model_folder, tmp_path_factory.mktemp("pair")) as cluster:
        yield cluster


@pytest.fixture(scope="package")
def two_prefills(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """Two prefill workers and one decode worker, prompts computed in chunks of 64 tokens."""
    folder = tmp_path_factory.mktemp("two-prefills")
    with running_cluster(model_folder, folder, "--prefill", "2", token_budget=64) as cluster:
        yield cluster


@pytest.fixture(scope="package")
def two_decodes(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """One prefill worker and two decode workers, which drain for a moment only before their streams are moved."""
    folder = tmp_path_factory.mktemp("two-decodes")
    settings = {"token_budget": 64, "drain_finish_s": 0.3, "drain_timeout_s": 20.0}
    with running_cluster(model_folder, folder, "--decode", "2", **settings) as cluster:
        yield cluster
