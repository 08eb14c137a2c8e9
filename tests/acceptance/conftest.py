"""Clusters that several acceptance tests share: one at a time, as each costs a part of a core although it is idle.

Tests are ordered by the cluster that they ask for, so that each is started once, and only when a test needs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from tests.acceptance.otlp_receiver import OtlpReceiver
from tests.acceptance.running_cluster import RunningCluster, running_cluster
from tests.engine.random_adapters import write_adapter

SHAPES: Final[dict[str, tuple[tuple[str, ...], dict[str, Any]]]] = {  # flags and settings, by fixture
    "pair": ((), {}),
    "two_prefills": (("--prefill", "2"), {"token_budget": 64}),
    "two_decodes": (
        ("--decode", "2"),
        {"token_budget": 64, "drain_finish_s": 0.3, "drain_timeout_s": 20.0, "heartbeat_timeout_s": 10.0},
    ),
}
ADAPTERS: Final = ("poet", "org/clerk")  # of the cluster `pair`, below its folder's `adapters`


class SharedClusters:
    """Holds the last one that was asked for."""

    def __init__(self, model_folder: Path, folders: pytest.TempPathFactory) -> None:
        self._model_folder = model_folder
        self._folders = folders
        self._shape = ""
        self._running = ExitStack()
        self._cluster: RunningCluster | None = None
        self.collector = OtlpReceiver()

    def use(self, shape: str) -> RunningCluster:
        if self._cluster is None or self._shape != shape:
            self.stop()
            flags, settings = SHAPES[shape]
            # Only requests that bring a traceparent are traced.
            settings = {"trace_endpoint": self.collector.endpoint, "trace_ratio": 0.0, **settings}
            folder = self._folders.mktemp(shape)
            if shape == "pair":
                settings["adapters"] = {
                    name: str(
                        write_adapter(folder / "adapters" / name, self._model_folder, rank=2, seed=seed, strength=0.2)
                    )
                    for seed, name in enumerate(ADAPTERS)
                }
            self._cluster = self._running.enter_context(running_cluster(self._model_folder, folder, *flags, **settings))
            self._shape = shape
        return self._cluster

    def stop(self) -> None:
        self._cluster = None
        self._running.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> int:
        names = getattr(item, "fixturenames", ()) if item.path.parent.name == "acceptance" else ()
        return next((number for number, shape in enumerate(SHAPES) if shape in names), len(SHAPES))

    items.sort(key=rank)


@pytest.fixture(scope="package")
def clusters(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedClusters]:
    shared = SharedClusters(model_folder, tmp_path_factory)
    yield shared
    shared.stop()
    shared.collector.close()


@pytest.fixture
def collector(clusters: SharedClusters) -> OtlpReceiver:
    """Where the shared clusters send their traces."""
    return clusters.collector


@pytest.fixture
def pair(clusters: SharedClusters) -> RunningCluster:
    """One prefill and one decode worker, as `make serve` starts them."""
    return clusters.use("pair")


@pytest.fixture
def two_prefills(clusters: SharedClusters) -> RunningCluster:
    """Two prefill workers and one decode worker, prompts computed in chunks of 64 tokens."""
    return clusters.use("two_prefills")


@pytest.fixture
def two_decodes(clusters: SharedClusters) -> RunningCluster:
    """One prefill worker and two decode workers, which drain for a moment only before their streams are moved."""
    return clusters.use("two_decodes")
