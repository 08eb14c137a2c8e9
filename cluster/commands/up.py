"""`tandem up`: start a cluster on this machine, check it, serve until Ctrl-C."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace

from cluster.commands import flags
from cluster.commands.model import ready_folder
from cluster.config import ClusterConfig
from cluster.folders import RunFolders, run_folders
from cluster.preflight import (
    require_adapters,
    require_cache_room,
    require_fit,
    require_model,
    require_policy,
    resolve_ports,
)
from cluster.progress import Progress
from cluster.supervisor import supervise


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `up`."""
    parser = commands.add_parser(
        "up",
        help="start a cluster on this machine and serve until Ctrl-C",
        description="Start a cluster on this machine and serve until Ctrl-C.",
        argument_default=flags.UNSET,
    )
    flags.add_config(parser)
    flags.add_model(parser)
    flags.add_workers(parser)
    flags.add_addresses(parser)
    text = "routers over the same workers; router i listens on each port plus 10 i"
    flags.add_flag(parser, "num_routers", text, type=int, metavar="N")
    flags.add_policy(parser)
    flags.add_controller(parser)
    parser.add_argument("--redis-url", metavar="URL", help="Redis or Valkey to use (default: an embedded one)")
    text = "compute each worker's steps on a core of its own, where there are enough (default: on)"
    flags.add_flag(parser, "pin_workers", text, action=argparse.BooleanOptionalAction)
    flags.add_flag(
        parser,
        "unpack_weights",
        "hold 4-bit and 8-bit weights as floats: three times the memory, faster for batches of 4 and more with AVX-512",
        action="store_true",
    )
    parser.add_argument(
        "--no-self-check", action="store_true", default=False, help="serve without checking parity first"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check what can be checked, then start; returns when all is down again."""
    progress = Progress()
    config = resolve_ports(flags.read_settings(arguments))
    require_adapters(config.adapters)
    require_policy(config.policy_file)
    require_cache_room(config)
    config = replace(config, model_folder=ready_folder(config.model_folder, progress))
    require_fit(config, require_model(config.model_folder))
    with run_folders() as folders:
        progress.say(f"logs: {folders.logs}")
        # Ray puts the working folder first on its actors' import path: a `core` that lies there must not win.
        os.chdir(folders.logs)
        return supervise(lambda: _serve(config, folders, progress, not arguments.no_self_check))


def _serve(config: ClusterConfig, folders: RunFolders, progress: Progress, self_check: bool) -> int:
    # Imported here: slow (gRPC, an HTTP client), and not before the fork that `supervise` makes.
    from cluster.serving import serve

    serve(config, folders, progress, self_check)
    return 0
