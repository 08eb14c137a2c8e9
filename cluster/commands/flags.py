"""Flags that set fields of ClusterConfig: the same in each command that has them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from cluster.config import ClusterConfig
from cluster.folders import DEFAULT_MODEL, default_model_folder
from cluster.settings import load_cluster_config, read_settings_file, unknown_variables, variable
from cluster.worker.config import DTYPES
from core.errors import BadRequest

# A flag that is not given stays unset, so that the file's value or the default holds.
UNSET: Final = argparse.SUPPRESS

_DEFAULTS: Final = {item.name: item.default for item in fields(ClusterConfig)}
# The flags of fields, where they are not the field's name with dashes.
_OTHER_NAMES: Final = {
    "model_folder": "--model",
    "adapters": "--adapter",
    "policy_file": "--policy",
    "num_prefill": "--prefill",
    "num_decode": "--decode",
    "num_routers": "--routers",
    "timeout_s": "--timeout",  # of `role` and `drain`: no field
}


def flag_of(field: str) -> str:
    return _OTHER_NAMES.get(field, f"--{field.replace('_', '-')}")


def source_of(field: str, arguments: argparse.Namespace) -> str:
    """Where the value of a field came from, as its user calls it: a flag, a variable, a key of the file. A field that
    was given nowhere, and what is none, keeps its name."""
    file: Path | None = getattr(arguments, "config", None)
    if field in vars(arguments):
        return flag_of(field)
    if os.environ.get(variable(field)):
        return variable(field)
    with suppress(BadRequest):
        if file is not None and field in read_settings_file(file):
            return f"{field} in {file}"
    return field


def read_settings(arguments: argparse.Namespace) -> ClusterConfig:
    """Defaults, file, environment, flags. Raises: BadRequest: what is wrong, by its name."""
    if unknown := unknown_variables(os.environ):
        print(f"tandem: in the environment, but no settings, and ignored: {', '.join(unknown)}", file=sys.stderr)
    overrides = {name: value for name, value in vars(arguments).items() if name in _DEFAULTS}
    if "adapters" in overrides:
        overrides["adapters"] = _by_name(overrides["adapters"])
    return load_cluster_config(getattr(arguments, "config", None), overrides, default_model_folder())


def add_config(parser: argparse.ArgumentParser) -> None:
    """--config."""
    text = "YAML with any field of ClusterConfig; TANDEM_<FIELD> in the environment goes first, flags before both"
    parser.add_argument("--config", type=Path, metavar="FILE", help=text)


def add_model(parser: argparse.ArgumentParser) -> None:
    """--model, --model-name."""
    parser.add_argument(
        "--model",
        dest="model_folder",
        type=Path,
        metavar="DIR|FILE.gguf",
        help=f"model folder in Hugging Face form, or a GGUF (default: {DEFAULT_MODEL}, made when missing)",
    )
    parser.add_argument("--model-name", metavar="NAME", help="name that clients ask for (default: the folder's name)")
    parser.add_argument(
        "--adapter",
        dest="adapters",
        action="append",
        metavar="NAME=FOLDER",
        help="a LoRA adapter of the model, in PEFT's form, and the name that clients ask for; may be given again",
    )


def _by_name(adapters: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in adapters:
        name, _, folder = text.partition("=")
        if not folder or name in found:
            raise BadRequest("--adapter", f"must be NAME=FOLDER, each name once, got {text!r}")
        found[name] = folder
    return found


def add_addresses(parser: argparse.ArgumentParser) -> None:
    """Where the router listens."""
    add_flag(parser, "http_host", "where the HTTP front listens", metavar="HOST")
    add_flag(parser, "http_port", "its port; 0: any free one", type=int, metavar="PORT")
    add_flag(parser, "grpc_host", "where the gRPC front listens", metavar="HOST")
    add_flag(parser, "grpc_port", "its port; 0: any free one", type=int, metavar="PORT")
    add_flag(parser, "registry_host", "where workers and `tandem status` find the router", metavar="HOST")
    add_flag(parser, "registry_port", "its port; 0: any free one", type=int, metavar="PORT")


def add_policy(parser: argparse.ArgumentParser) -> None:
    """--policy."""
    text = "YAML of tenants, keys, limits, the queue's bounds and weights of routing; read again whenever it changes"
    parser.add_argument("--policy", dest="policy_file", type=Path, metavar="FILE", help=text)


def add_controller(parser: argparse.ArgumentParser) -> None:
    """Where the controller listens."""
    add_flag(parser, "controller_host", "where `tandem role` finds the controller", metavar="HOST")
    add_flag(parser, "controller_port", "its port; 0: any free one", type=int, metavar="PORT")


def add_workers(parser: argparse.ArgumentParser) -> None:
    """How many workers, and what each is like."""
    add_flag(parser, "num_prefill", "prefill workers", type=int, metavar="N")
    add_flag(parser, "num_decode", "decode workers", type=int, metavar="M")
    add_flag(parser, "aggregated", "no prefill workers: decode workers prefill too", action="store_true")
    add_flag(parser, "dtype", "of KV and of what is multiplied", choices=DTYPES)
    add_flag(parser, "num_blocks", "KV blocks of each worker", type=int, metavar="N")
    add_flag(parser, "block_size", "tokens of a block", type=int, metavar="N")
    add_flag(parser, "host_cache_bytes", "host memory of each worker for cached KV: 8GiB", metavar="SIZE")
    text = "disk of each worker behind that, of which at most half of --host-cache-bytes is read back at a time: 100GB"
    add_flag(parser, "disk_cache_bytes", text, metavar="SIZE")
    add_flag(parser, "disk_cache_folder", "where that is", type=Path, metavar="DIR")
    add_flag(parser, "token_budget", "most tokens of one engine step", type=int, metavar="N")


def add_flag(parser: argparse.ArgumentParser, field: str, text: str, **options: Any) -> None:
    """One flag for one field, with the field's default in its help."""
    default = "" if "action" in options else f" (default: {_DEFAULTS[field]})"
    parser.add_argument(flag_of(field), dest=field, help=text + default, **options)


def add_url(parser: argparse.ArgumentParser) -> None:
    """Where a router is called: `url`."""
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the HTTP front (default: %(default)s)")


def add_registry(parser: argparse.ArgumentParser) -> None:
    """Where routers are asked: `registry`."""
    parser.add_argument(
        "--registry",
        default="127.0.0.1:50052",
        metavar="HOST:PORT,...",
        help="the registry of each router, or a name that resolves to all (default: %(default)s)",
    )


def add_controller_address(parser: argparse.ArgumentParser) -> None:
    """Where the controller is asked: `controller`."""
    parser.add_argument(
        "--controller", default="127.0.0.1:50053", metavar="HOST:PORT", help="the controller (default: %(default)s)"
    )
