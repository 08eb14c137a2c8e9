"""What is refused of cache tiers, each by the setting that helps, before anything is served."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from cluster.config import ClusterConfig
from cluster.preflight import require_cache_room
from cluster.worker.config import WorkerConfig
from cluster.worker.engine import build_engine
from core.blocks import CacheTier
from core.errors import BadRequest
from core.membership import Role
from tests.engine.tiny_model import write_tiny_model

BLOCK_BYTES = 2 * 2 * 2 * 16 * 16 * 4  # of the tiny model: keys and values, layers, heads, tokens, head size, float32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def config(folder: Path, **more: object) -> WorkerConfig:
    return WorkerConfig(
        worker_id="d0",
        incarnation="1",
        role=Role.DECODE,
        model_folder=folder,
        router_addresses=("127.0.0.1:1",),
        num_blocks=8,
        **more,
    )


def test_without_settings_there_are_no_tiers(folder: Path) -> None:
    engine = build_engine(config(folder))
    assert engine.tiers is None
    assert engine.pool.num_cached_by_tier() == {CacheTier.DEVICE: 0}


def test_settings_become_slots(folder: Path, tmp_path: Path) -> None:
    settings = {"disk_cache_bytes": 5 * BLOCK_BYTES, "disk_cache_folder": tmp_path}
    engine = build_engine(config(folder, host_cache_bytes=3 * BLOCK_BYTES + 1, **settings))
    assert engine.block_bytes == BLOCK_BYTES
    assert engine.pool.tiers.num_slots == {CacheTier.HOST: 3, CacheTier.DISK: 5}
    assert engine.tiers is not None and engine.tiers.disk is not None
    assert os.listdir(tmp_path) == []
    engine.tiers.disk.close()


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("host_cache_bytes", {"host_cache_bytes": -1}, "must be in"),
        ("host_cache_bytes", {"host_cache_bytes": BLOCK_BYTES - 1}, f"one block of {BLOCK_BYTES}"),
        (
            "disk_cache_bytes",
            {"disk_cache_bytes": BLOCK_BYTES, "disk_cache_folder": Path("/")},
            "needs host_cache_bytes",
        ),
        ("disk_cache_folder", {"host_cache_bytes": BLOCK_BYTES, "disk_cache_bytes": BLOCK_BYTES}, "must be given"),
        ("disk_cache_folder", {"disk_cache_folder": Path("/")}, "only then"),
        ("disk_cache_bytes", {"disk_cache_bytes": 1, "disk_cache_folder": Path("HERE")}, f"one block of {BLOCK_BYTES}"),
        ("disk_cache_bytes", {"disk_cache_bytes": 1 << 46, "disk_cache_folder": Path("HERE")}, "but .* has .* free"),
        (
            "disk_cache_folder",
            {"disk_cache_bytes": BLOCK_BYTES, "disk_cache_folder": Path("HERE/none")},
            "cannot be written",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    folder: Path, tmp_path: Path, name: str, settings: dict[str, object], says: str
) -> None:
    here = settings.get("disk_cache_folder")
    if isinstance(here, Path) and here.parts[0] == "HERE":
        settings = {
            "host_cache_bytes": BLOCK_BYTES,
            **settings,
            "disk_cache_folder": tmp_path.joinpath(*here.parts[1:]),
        }
    with pytest.raises(BadRequest, match=says) as refused:
        build_engine(config(folder, **settings))
    assert refused.value.field == name
    assert os.listdir(tmp_path) == []


def test_all_workers_of_this_machine_must_have_room(folder: Path, tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free

    def cluster(num_bytes: int, where: Path = tmp_path) -> ClusterConfig:
        return ClusterConfig(
            folder, num_prefill=2, num_decode=2, host_cache_bytes=1, disk_cache_bytes=num_bytes, disk_cache_folder=where
        )

    require_cache_room(ClusterConfig(folder))
    require_cache_room(cluster(free // 8))
    with pytest.raises(BadRequest, match="of all workers") as refused:
        require_cache_room(cluster(free // 2))
    assert refused.value.field == "disk_cache_bytes"
    with pytest.raises(BadRequest, match="cannot be written") as refused:
        require_cache_room(cluster(1, tmp_path / "none"))
    assert refused.value.field == "disk_cache_folder"
