"""A worker's engine, built from its configuration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cluster.config import ClusterConfig, worker_config
from cluster.worker_engine import build_engine
from core.errors import BadModel
from core.membership import Role
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
