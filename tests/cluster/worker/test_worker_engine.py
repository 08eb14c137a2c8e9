"""A worker's engine, built from its configuration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.config import ClusterConfig, worker_config
from cluster.worker import engine
from cluster.worker.engine import build_engine
from core.errors import BadModel
from core.membership import Role
from engine.load_runner import load_runner
from engine.runner import ModelRunner
from tests.engine.random_adapters import write_adapter
from tests.engine.tiny_model import write_tiny_model


def test_an_adapter_that_cannot_be_computed_ends_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_ENGINE", "torch")
    folder = write_tiny_model(tmp_path / "tiny")
    good = write_adapter(tmp_path / "good", folder)
    large = write_adapter(tmp_path / "large", folder, strength=1e30)
    cluster = ClusterConfig(folder, num_blocks=4, adapters={"good": good})
    config = worker_config(cluster, "decode-0", "1", Role.DECODE, router_addresses=("127.0.0.1:50051",))
    assert {adapter.name for adapter in build_engine(config).adapters} == {"good"}
    with pytest.raises(BadModel, match=f"{large}: cannot be computed"):
        build_engine(replace(config, adapters={"good": good, "large": large}))


def test_an_adapter_that_changes_between_its_digest_and_its_weights_ends_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its KV would be found by requests for what it was."""
    monkeypatch.setenv("TANDEM_ENGINE", "torch")
    folder = write_tiny_model(tmp_path / "tiny")
    good = write_adapter(tmp_path / "good", folder)
    cluster = ClusterConfig(folder, num_blocks=4, adapters={"good": good})
    config = worker_config(cluster, "decode-0", "1", Role.DECODE, router_addresses=("127.0.0.1:50051",))
    build_engine(config)

    def load_another(*settings: Any, **more: Any) -> ModelRunner:
        write_adapter(good, folder, seed=1)
        return load_runner(*settings, **more)

    monkeypatch.setattr(engine, "load_runner", load_another)
    with pytest.raises(BadModel, match=f"{good}: changed while it was loaded"):
        build_engine(config)
