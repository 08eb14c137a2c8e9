"""Fixtures that every room's tests may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from cluster.folders import default_model_folder

# Before torch is first imported: two processes test at once, and a second thread gains nothing in so small steps.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Before Triton is first imported, by whatever test: its kernels run on a CPU. tests/gpu needs 0.
os.environ.setdefault("TRITON_INTERPRET", "1")

OWN_CLUSTERS = (
    "test_faults",
    "test_hosts",
    "test_other_clusters",
    "test_prefix_routing",
    "test_refused_handoff",
    "test_router_replicas",
)
# They share one.
ON_RAY = ("test_burial", "test_controller", "test_host_controller", "test_spare")


class ByFile(LoadScopeScheduling):
    """What shares costly fixtures runs in one process: a file its models, most acceptance tests their clusters.

    pytest-xdist's own groups are not read by this version of pytest.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = Path(nodeid.partition("::")[0])
        if file.parent.name == "acceptance" and file.stem not in OWN_CLUSTERS:
            return "shared clusters"
        return "on Ray" if file.parent.name == "cluster" and file.stem in ON_RAY else str(file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFile:
    return ByFile(config, log)


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The default model as a Hugging Face folder, imported once per machine (about 8 s)."""
    from engine.gguf_import import import_default_model  # slow to import, and most tests need no model

    return import_default_model(default_model_folder(), lambda _line: None)
