"""Which ports must be free before which command starts."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.commands import flags
from cluster.config import ClusterConfig
from cluster.preflight import require_adapters, resolve_ports, resolve_router_ports
from core.errors import BadRequest
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
            assert error.value.message.endswith(f"choose another one with {flags.flag_of(taken)}")
        else:
            assert getattr(resolve(config), taken) == ports[taken]


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
