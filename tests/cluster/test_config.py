"""Settings: from flags and YAML, refused by their names."""

from __future__ import annotations

import argparse
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from cluster.commands import flags
from cluster.config import ClusterConfig, router_config, worker_config
from cluster.settings import OTHER_VARIABLES, load_cluster_config
from cluster.worker.addresses import listening_address
from cluster.worker.config import WorkerConfig
from core.errors import BadRequest
from core.membership import Role
from engine.cache_folder import cache_folder

MODEL = Path("/models/tiny")


def test_defaults_are_one_of_each_on_loopback() -> None:
    config = load_cluster_config(None, {}, MODEL)
    assert config.roles == {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE}
    assert (config.http_host, config.http_port) == ("127.0.0.1", 8000)
    assert (config.grpc_host, config.grpc_port) == ("127.0.0.1", 50051)
    assert config.served_model_name == "tiny"


def test_aggregated_has_decode_workers_only() -> None:
    config = load_cluster_config(None, {"aggregated": True, "num_decode": 2}, MODEL)
    assert config.roles == {"decode-0": Role.DECODE, "decode-1": Role.DECODE}


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("num_decode: 3\nnum_blocks: 64\nlease_s: 4\nmodel_folder: /models/other\n")
    config = load_cluster_config(file, {"num_blocks": 128}, MODEL)
    assert (config.num_decode, config.num_blocks, config.lease_s) == (3, 128, 4.0)
    assert config.model_folder == Path("/models/other")


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("8589934592", 1 << 33),
        ("8GiB", 1 << 33),
        ("8 gib", 1 << 33),
        ("8GB", 8 * 10**9),
        ("512MiB", 1 << 29),
        ("1.5 KiB", 1536),
        ("1024B", 1024),
        ("64TiB", 1 << 46),
    ],
)
def test_bytes_may_have_a_unit_wherever_they_are_set(
    text: str, num_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parser = argparse.ArgumentParser(argument_default=flags.UNSET)
    flags.add_config(parser)
    flags.add_workers(parser)
    assert flags.read_settings(parser.parse_args(["--host-cache-bytes", text])).host_cache_bytes == num_bytes
    file = tmp_path / "cluster.yaml"
    file.write_text(f"host_cache_bytes: {text}\n")
    assert load_cluster_config(file, {}, MODEL).host_cache_bytes == num_bytes
    monkeypatch.setenv("TANDEM_HOST_CACHE_BYTES", text)
    assert load_cluster_config(None, {}, MODEL).host_cache_bytes == num_bytes


def test_the_fields_that_are_read_as_sizes_are_those_in_bytes() -> None:
    sizes = {"host_cache_bytes": "1MiB", "disk_cache_bytes": "2MiB", "kv_bytes_in_flight": "3MiB"}
    config = load_cluster_config(None, {**sizes, "disk_cache_folder": "/cache"}, MODEL)
    assert [getattr(config, name) >> 20 for name in sizes] == [1, 2, 3]
    assert {item.name for item in fields(ClusterConfig) if "bytes" in item.name} == sizes.keys()


@pytest.mark.parametrize(
    "text", ["8G", "8Gib/s", "GiB", "1.5", "1,5GB", "-1GiB", "1e9", "8 8GB", "0x10", "\u0663GB", ""]
)
def test_a_size_that_is_none_is_refused_with_what_is_taken(text: str) -> None:
    with pytest.raises(BadRequest) as caught:
        load_cluster_config(None, {"host_cache_bytes": text}, MODEL)
    assert caught.value.field == "host_cache_bytes"
    assert all(unit in caught.value.message for unit in ("KB, MB, GB, TB", "KiB, MiB, GiB, TiB", "such as 8GiB"))


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"num_decode": 0}, "num_decode"),
        ({"num_prefill": 0}, "num_prefill"),
        ({"num_prefill": 1, "aggregated": True}, "num_prefill"),
        ({"http_port": 70000}, "http_port"),
        ({"http_port": 50051}, "grpc_port"),
        ({"num_routers": 0}, "num_routers"),
        ({"num_routers": 2, "grpc_port": 8010}, "grpc_port"),
        ({"num_routers": 3, "http_port": 65520}, "http_port"),
        ({"http_port": True}, "http_port"),
        ({"http_port": "8000"}, "http_port"),
        ({"http_host": ""}, "http_host"),
        ({"ray_address": "head"}, "ray_address"),
        ({"worker_host": ""}, "worker_host"),
        ({"metrics_port": -1}, "metrics_port"),
        ({"controller_health_port": 0}, "controller_health_port"),
        ({"dtype": "float16"}, "dtype"),
        ({"num_blocks": 0}, "num_blocks"),
        ({"block_size": 1000}, "block_size"),
        ({"token_budget": 0}, "token_budget"),
        ({"prefill_delay_steps": -1}, "prefill_delay_steps"),
        ({"max_decode_slowdown": 1.0}, "max_decode_slowdown"),
        ({"max_decode_slowdown": float("nan")}, "max_decode_slowdown"),
        ({"redis_url": "http://x"}, "redis_url"),
        ({"redis_url": "redis+sentinel://a:1,b:2"}, "redis_url"),
        ({"lease_s": float("nan")}, "lease_s"),
        ({"model_folder": None}, "model_folder"),
        ({"num_decodes": 1}, "num_decodes"),
        ({"adapters": "poet=/adapters/poet"}, "adapters"),
        ({"adapters": {"poet": None}}, "adapters"),
        ({"adapters": {"po et": "/adapters/poet"}}, "adapters"),
        ({"adapters": {"tiny": "/adapters/poet"}}, "adapters"),
    ],
)
def test_a_wrong_setting_is_refused_by_its_name(overrides: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        load_cluster_config(None, overrides, MODEL)
    assert caught.value.field == field


def test_adapters_have_names_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("adapters: {poet: /adapters/poet, org/clerk: adapters/clerk}\n")
    monkeypatch.chdir(tmp_path)
    config = load_cluster_config(file, {}, MODEL)
    assert config.adapters == {"poet": Path("/adapters/poet"), "org/clerk": tmp_path / "adapters/clerk"}
    worker = worker_config(config, "decode-0", "9f3a", Role.DECODE, router_addresses=("127.0.0.1:50051",))
    assert worker.adapters == router_config(config).adapters == config.adapters
    monkeypatch.setenv("TANDEM_ADAPTERS", "{clerk: /clerk}")
    assert load_cluster_config(file, {}, MODEL).adapters == {"clerk": Path("/clerk")}


def test_the_environment_wins_over_the_file_and_flags_over_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("num_decode: 3\nnum_blocks: 64\nmodel_name: a\n")
    values = {"NUM_DECODE": "4", "NUM_BLOCKS": "128", "MODEL_NAME": "123", "AGGREGATED": "true", "LEASE_S": "4"}
    for name, value in values.items():
        monkeypatch.setenv(f"TANDEM_{name}", value)
    config = load_cluster_config(file, {"num_blocks": 256}, MODEL)
    assert (config.num_decode, config.num_blocks, config.model_name) == (4, 256, "123")
    assert (config.aggregated, config.lease_s) == (True, 4.0)


@pytest.mark.parametrize("value", ["tcp://10.0.0.1:8000", "[", "8000.5", "2026-99-99", "9" * 5000, "[" * 5000])
def test_a_wrong_variable_is_refused_by_its_fields_name(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("TANDEM_HTTP_PORT", value)
    with pytest.raises(BadRequest) as caught:
        load_cluster_config(None, {}, MODEL)
    assert caught.value.field == "http_port"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("policy_file", "~nobody-of-this-name/p"),
        ("model_folder", "~nobody-of-this-name/m"),
        ("adapters", "{a: ~nobody-of-this-name/a}"),
        ("max_decode_slowdown", "9" * 400),
    ],
)
def test_a_variable_that_means_nothing_here_is_refused_by_its_fields_name(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(f"TANDEM_{name.upper()}", value)
    with pytest.raises(BadRequest) as caught:
        load_cluster_config(None, {}, MODEL)
    assert caught.value.field == name


def test_the_registry_is_reached_at_its_routers_name() -> None:
    assert ClusterConfig(MODEL, registry_host="0.0.0.0").registry_addresses == ("0.0.0.0:50052",)
    config = ClusterConfig(MODEL, registry_host="0.0.0.0", router_host="tandem-router")
    assert config.registry_addresses == ("tandem-router:50052",)
    assert router_config(config).registry_host == "0.0.0.0"


def test_each_router_has_ports_of_its_own() -> None:
    config = ClusterConfig(MODEL, num_routers=3)
    assert config.registry_addresses == ("127.0.0.1:50052", "127.0.0.1:50062", "127.0.0.1:50072")
    second = router_config(config.of_router(1))
    assert (second.http_port, second.grpc_port, second.registry_port) == (8010, 50061, 50062)


def one_life(router_addresses: tuple[str, ...], **settings: Any) -> WorkerConfig:
    cluster = ClusterConfig(MODEL, **settings)
    return worker_config(cluster, "decode-0", "9f3a", Role.DECODE, router_addresses=router_addresses)


def test_a_worker_listens_where_its_host_has_an_address() -> None:
    def address(**settings: str) -> str:
        return listening_address(one_life(("127.0.0.1:1",), **settings))

    assert address() == "127.0.0.1"
    assert address(worker_host="10.1.2.3") == "10.1.2.3"
    assert address(worker_host="auto") == "127.0.0.1"
    assert address(worker_host="auto", kv_interface="mlx5_0:1,no-such-interface,lo") == "127.0.0.1"
    with pytest.raises(BadRequest) as caught:
        address(worker_host="auto", kv_interface="mlx5_0:1")
    assert caught.value.field == "kv_interface"


def test_workers_take_interfaces_and_numa_nodes_in_turn() -> None:
    cluster = ClusterConfig(MODEL, num_prefill=1, num_decode=2, kv_interface="mlx5_0:1,eth0;mlx5_1:1", numa_nodes="4,7")
    taken = [
        (config.worker_id, config.kv_interface, config.numa_node)
        for config in (
            worker_config(cluster, name, "9f3a", role, router_addresses=("127.0.0.1:1",))
            for name, role in cluster.roles.items()
        )
    ]
    assert taken == [("prefill-0", "mlx5_0:1,eth0", 4), ("decode-0", "mlx5_1:1", 7), ("decode-1", "mlx5_0:1,eth0", 4)]
    anywhere = worker_config(ClusterConfig(MODEL), "decode-0", "9f3a", Role.DECODE, router_addresses=("127.0.0.1:1",))
    assert (anywhere.kv_interface, anywhere.numa_node) == ("lo", None)


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("numa_nodes", {"numa_nodes": "0,"}),
        ("numa_nodes", {"numa_nodes": "-1"}),
        ("numa_nodes", {"numa_nodes": "5000"}),
        ("kv_interface", {"kv_interface": "eth0;"}),
        ("kv_interface", {"kv_interface": "lo,"}),
        ("kv_interface", {"kv_interface": "lo;,lo"}),
    ],
)
def test_affinities_that_nobody_can_take_are_refused(field: str, settings: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        ClusterConfig(MODEL, **settings)
    assert caught.value.field == field


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [\n", "nonsense", "\xff", "a: 2026-99-99", "[" * 5000])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(BadRequest) as caught:
        load_cluster_config(file, {}, MODEL)
    assert caught.value.field == "config"


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("# nothing\n")
    assert load_cluster_config(file, {}, MODEL) == ClusterConfig(MODEL)


def test_a_worker_gets_its_share_of_the_cluster() -> None:
    cluster = ClusterConfig(MODEL, num_blocks=64, dtype="bfloat16", redis_url="redis://127.0.0.1:1/0")
    config = worker_config(cluster, "decode-0", "9f3a", Role.DECODE, router_addresses=("127.0.0.1:50051",))
    assert config == WorkerConfig(
        worker_id="decode-0",
        incarnation="9f3a",
        role=Role.DECODE,
        model_folder=MODEL,
        router_addresses=("127.0.0.1:50051",),
        dtype="bfloat16",
        num_blocks=64,
        redis_url="redis://127.0.0.1:1/0",
    )


def test_a_worker_without_a_router_is_refused() -> None:
    with pytest.raises(BadRequest, match="router_addresses"):
        one_life(())


@pytest.mark.parametrize(
    "text",
    ["num_decode: 1\nnum_decode: 2\n", "adapters: {a: /x, a: /y}\n", "x: &a [1]\ny: *a\n"],
    ids=["key", "nested", "alias"],
)
def test_a_setting_that_stands_twice_is_refused_not_lost(tmp_path: Path, text: str) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    with pytest.raises(BadRequest, match=r"twice|aliases") as caught:
        load_cluster_config(file, {}, tmp_path)
    assert caught.value.field == "config"
    file.write_text("num_decode: 2\n")
    assert load_cluster_config(file, {}, tmp_path).num_decode == 2


def test_a_cache_of_nobody_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CACHE", "~nobody-has-this-name/x")
    with pytest.raises(BadRequest, match="TANDEM_CACHE"):
        cache_folder()
    monkeypatch.setenv("TANDEM_CACHE", "~/x")
    assert cache_folder() == Path.home() / "x"


def test_the_variables_that_are_no_settings_are_those_that_our_code_reads() -> None:
    root = Path(__file__).parents[2]
    sources = (path for room in ("cluster", "engine", "kv_transfer", "router") for path in (root / room).rglob("*.py"))
    read = {name for path in sources for name in re.findall(r'= "(TANDEM_[A-Z_]+)"', path.read_text())}
    assert read == OTHER_VARIABLES


def test_each_worker_computes_on_a_core_of_its_own_where_there_are_enough() -> None:
    config = ClusterConfig(Path("model"), num_prefill=2, num_decode=1)
    workers = ("prefill-0", "prefill-1", "decode-0")
    assert [config.core_of(worker, [4, 5, 6, 7]) for worker in workers] == [4, 5, 6]
    assert {config.core_of(worker, [4, 5]) for worker in workers} == {None}
    assert replace(config, numa_nodes="0").core_of("decode-0", [4, 5, 6, 7]) is None
    assert replace(config, pin_workers=False).core_of("decode-0", [4, 5, 6, 7]) is None
