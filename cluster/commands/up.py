"""`tandem up`: start a cluster on this machine, check it, serve until Ctrl-C."""

from __future__ import annotations

import argparse
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

from cluster.commands.model import ready_folder
from cluster.config import DTYPES, ClusterConfig, load_cluster_config
from cluster.folders import DEFAULT_MODEL, RunFolders, default_model_folder, run_folders
from cluster.preflight import require_model, resolve_ports
from cluster.progress import Progress
from cluster.supervisor import supervise

REDIS_URL_VARIABLE: Final = "TANDEM_REDIS_URL"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `up`. A flag that is not given stays unset, so that the file's value or the default holds."""
    text = "start a cluster on this machine and serve until Ctrl-C"
    parser = commands.add_parser(
        "up", help=text, description=f"{text.capitalize()}.", argument_default=argparse.SUPPRESS
    )
    defaults = {item.name: item.default for item in fields(ClusterConfig)}

    def flag(name: str, field: str, help_text: str, **options: Any) -> None:
        default = "" if "action" in options else f" (default: {defaults[field]})"
        parser.add_argument(name, dest=field, help=help_text + default, **options)

    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML with any field of ClusterConfig; flags go first"
    )
    parser.add_argument(
        "--model",
        dest="model_folder",
        type=Path,
        metavar="DIR|FILE.gguf",
        help=f"model folder in Hugging Face form, or a GGUF (default: {DEFAULT_MODEL}, made when missing)",
    )
    parser.add_argument("--model-name", metavar="NAME", help="name that clients ask for (default: the folder's name)")
    flag("--prefill", "num_prefill", "prefill workers", type=int, metavar="N")
    flag("--decode", "num_decode", "decode workers", type=int, metavar="M")
    flag("--aggregated", "aggregated", "no prefill workers: decode workers prefill too", action="store_true")
    flag("--http-host", "http_host", "where the HTTP front listens", metavar="HOST")
    flag("--http-port", "http_port", "its port; 0: any free one", type=int, metavar="PORT")
    flag("--grpc-host", "grpc_host", "where the gRPC front listens", metavar="HOST")
    flag("--grpc-port", "grpc_port", "its port; 0: any free one", type=int, metavar="PORT")
    flag("--registry-host", "registry_host", "where workers and `tandem status` find the router", metavar="HOST")
    flag("--registry-port", "registry_port", "its port; 0: any free one", type=int, metavar="PORT")
    flag("--dtype", "dtype", "of weights and KV", choices=DTYPES)
    flag("--num-blocks", "num_blocks", "KV blocks of each worker", type=int, metavar="N")
    flag("--block-size", "block_size", "tokens of a block", type=int, metavar="N")
    flag("--token-budget", "token_budget", "most tokens of one engine step", type=int, metavar="N")
    parser.add_argument(
        "--redis-url", metavar="URL", help=f"Redis or Valkey to use (default: {REDIS_URL_VARIABLE}, or an embedded one)"
    )
    flag("--pin-workers", "pin_workers", "give each worker a core of its own", action="store_true")
    parser.add_argument(
        "--no-self-check", action="store_true", default=False, help="serve without checking parity first"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check what can be checked, then start; returns when all is down again."""
    progress = Progress()
    config = resolve_ports(_config(arguments))
    config = replace(config, model_folder=ready_folder(config.model_folder, progress))
    require_model(config.model_folder)
    with run_folders() as folders:
        progress.say(f"logs: {folders.logs}")
        # Ray puts the working folder first on its actors' import path: a `core` that lies there must not win.
        os.chdir(folders.logs)
        return supervise(lambda: _serve(config, folders, progress, not arguments.no_self_check))


def _serve(config: ClusterConfig, folders: RunFolders, progress: Progress, self_check: bool) -> int:
    # Imported here: slow (gRPC, an HTTP client), and not before the fork that `supervise` makes.
    from cluster.serving import run_until_signal

    run_until_signal(config, folders, progress, self_check)
    return 0


def _config(arguments: argparse.Namespace) -> ClusterConfig:
    names = {item.name for item in fields(ClusterConfig)}
    overrides = {name: value for name, value in vars(arguments).items() if name in names}
    if "redis_url" not in overrides and os.environ.get(REDIS_URL_VARIABLE):
        overrides["redis_url"] = os.environ[REDIS_URL_VARIABLE]
    return load_cluster_config(getattr(arguments, "config", None), overrides, default_model_folder())
