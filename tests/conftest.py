"""Fixtures that every room's tests may use."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from cluster.folders import default_model_folder

# Before torch is first imported. Passive: on a busy machine, threads that spin at barriers are ten times slower.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Before Triton is first imported, by whatever test: its kernels run on a CPU. tests/gpu needs 0.
os.environ.setdefault("TRITON_INTERPRET", "1")

SHARED_CLUSTERS = frozenset({"pair", "two_prefills"})


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: Iterable[pytest.Function]) -> None:
    """What shares costly fixtures runs in one process: several acceptance tests a cluster, a file its models."""
    for item in items:
        shares_cluster = SHARED_CLUSTERS.intersection(item.fixturenames)
        item.add_marker(pytest.mark.xdist_group("shared clusters" if shares_cluster else item.path.name))


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The default model as a Hugging Face folder, imported once per machine (about 8 s)."""
    from engine.gguf_import import import_default_model  # slow to import, and most tests need no model

    return import_default_model(default_model_folder(), lambda _line: None)
