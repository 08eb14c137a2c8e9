"""Which ports must be free before which command starts."""

from __future__ import annotations

import argparse
import re
import shutil
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.commands import flags
from cluster.config import ClusterConfig
from cluster.free_ports import can_listen, free_ports
from cluster.preflight import (
    require_adapters,
    require_cache_room,
    require_fit,
    require_gguf,
    require_model,
    resolve_ports,
    resolve_router_ports,
)
from cluster.worker.config import DTYPES
from core.errors import BadRequest
from engine.model_config import ModelConfig
from tests.engine.random_adapters import write_adapter
from tests.engine.tiny_model import write_tiny_model

NAMES = ("http_port", "grpc_port", "registry_port", "controller_port")


@pytest.mark.parametrize(
    ("resolve", "taken", "refused"),
    [(resolve_ports, name, True) for name in NAMES]
    + [(resolve_router_ports, name, name != "controller_port") for name in NAMES],
)
def test_a_command_asks_for_the_ports_that_it_listens_on(
    resolve: Callable[[ClusterConfig], ClusterConfig], taken: str, refused: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ports = dict.fromkeys(NAMES, 0) | {taken: listener.getsockname()[1]}
        config = ClusterConfig(Path("model"), **ports)
        if refused:
            with pytest.raises(BadRequest) as error:
                resolve(config)
            assert error.value.field == taken
            said = f"port {ports[taken]} on 127.0.0.1 ({flags.flag_of(taken)}) is in use"
            assert error.value.message == f"{said}: choose another one; 0 takes any free one"
        else:
            assert getattr(resolve(config), taken) == ports[taken]


def test_all_ports_that_are_taken_are_named_at_once() -> None:
    """As for a second `tandem up`; those of the routers behind the first are its flags' too."""
    ports = [port for port in free_ports(20) if can_listen("127.0.0.1", port - 10)]
    taken, free = dict(zip(NAMES, ports, strict=False)), dict(zip(NAMES, ports[4:], strict=False))
    with ExitStack() as stack:
        for port in taken.values():
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        with pytest.raises(BadRequest) as error:
            resolve_ports(ClusterConfig(Path("model"), **taken))
        for name, port in taken.items():
            assert f"port {port} on 127.0.0.1 ({flags.flag_of(name)}) is in use" in error.value.message
        before = free | {"http_port": taken["http_port"] - 10}
        resolve_ports(ClusterConfig(Path("model"), **before))
        said = f"http_port: port {taken['http_port']} on 127.0.0.1 (--http-port) is in use: "
        with pytest.raises(BadRequest, match=re.escape(said)):
            resolve_ports(ClusterConfig(Path("model"), num_routers=2, **before))


def test_a_folder_or_file_that_is_no_model_is_refused_by_its_path(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    (model / "tokenizer.json").write_text("{}")
    (model / "tokenizer_config.json").write_text("{}")
    assert require_model(model) == ModelConfig.load(model)
    spoilt = {
        "config.json": (b"\x00\xff" * 99, "config.json: cannot be read as JSON"),
        "tokenizer.json": (b"[]", "tokenizer.json: must hold a JSON object"),
    }
    for name, (content, said) in spoilt.items():
        whole = (model / name).read_bytes()
        (model / name).write_bytes(content)
        with pytest.raises(BadRequest, match=re.escape(f"{model}/{said}")):
            require_model(model)
        (model / name).write_bytes(whole)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        lacking = shutil.copytree(model, tmp_path / f"no-{name}")
        (lacking / name).unlink()
        with pytest.raises(BadRequest, match=rf"^model_folder: {lacking} has no .*: a folder with config\.json"):
            require_model(lacking)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(BadRequest, match=r"has no config\.json, tokenizer\.json, tokenizer_config\.json, .*: a folder"):
        require_model(empty)
    (empty / "tiny.gguf").write_bytes(b"GGUF")
    require_gguf(empty / "tiny.gguf")
    with pytest.raises(BadRequest, match=r"it has tiny\.gguf: name that file"):
        require_model(empty)
    with pytest.raises(BadRequest, match="is a file, but no GGUF: a folder with"):
        require_gguf(Path("/etc/hostname"))
    with pytest.raises(BadRequest, match=r"/dev/null cannot be read: Not a directory: a folder with"):
        require_model(Path("/dev/null"))


@pytest.mark.parametrize("name", ["host_cache_bytes", "disk_cache_bytes"])
def test_caches_that_hold_no_block_of_the_model_are_refused_before_anything_starts(name: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    model = ModelConfig.load(folder)
    for dtype, dtype_bytes in DTYPES.items():
        block_bytes = model.kv_geometry(16, dtype_bytes).block_bytes
        enough = {"host_cache_bytes": block_bytes, "disk_cache_bytes": block_bytes, "disk_cache_folder": tmp_path}
        config = ClusterConfig(folder, dtype=dtype, **enough)
        require_fit(config, model)
        with pytest.raises(BadRequest, match=f"^{name}: must be 0 or hold at least one block of {block_bytes} bytes"):
            require_fit(replace(config, **{name: block_bytes - 1}), model)
    with pytest.raises(BadRequest, match=r"^tensor_parallel_size: 64 does not divide"):
        require_fit(replace(config, tensor_parallel_size=64), model)


def test_caches_that_this_machine_has_no_memory_for_are_refused() -> None:
    config = ClusterConfig(Path("model"), host_cache_bytes=1 << 30, num_decode=1)
    require_cache_room(config)
    with pytest.raises(BadRequest, match=r"^host_cache_bytes: .* of all workers, but this machine has "):
        require_cache_room(replace(config, host_cache_bytes=1 << 40, num_prefill=64))


def test_adapters_are_looked_at_before_anything_starts(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser(argument_default=flags.UNSET)
    flags.add_model(parser)
    model = write_tiny_model(tmp_path / "model")
    good = write_adapter(tmp_path / "good", model)
    odd = write_adapter(tmp_path / "odd", model, use_dora=True)

    def read(*texts: str) -> ClusterConfig:
        given = [word for text in texts for word in ("--adapter", text)]
        return flags.read_settings(parser.parse_args(["--model", str(model), *given]))

    assert read(f"poet={good}", f"org/poet={good}").adapters == {"poet": good, "org/poet": good}
    require_adapters(read(f"poet={good}").adapters)
    with pytest.raises(BadRequest, match=r"odd/adapter_config\.json: use_dora: is not supported"):
        require_adapters(read(f"poet={good}", f"odd={odd}").adapters)
    (good / "adapter_model.safetensors").unlink()
    with pytest.raises(BadRequest, match=r"adapter_model\.safetensors: cannot be read"):
        require_adapters(read(f"poet={good}").adapters)
    for texts in ((str(good),), (f"poet={good}", f"poet={odd}"), ("poet=",)):
        with pytest.raises(BadRequest, match=r"--adapter: must be NAME=FOLDER"):
            read(*texts)


def test_no_connection_can_take_a_port_that_was_chosen_before_its_server_listens() -> None:
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    resolved = resolve_ports(ClusterConfig(Path("model"), **dict.fromkeys(NAMES, 0)))
    ports = {getattr(resolved, name) for name in NAMES}
    assert len(ports) == len(NAMES) and max(ports) < first_ephemeral
