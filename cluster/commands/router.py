"""`tandem router`: the router alone, for a cluster on several hosts. Knows no Ray."""

from __future__ import annotations

import argparse

from cluster.commands import flags
from cluster.preflight import require_model, require_policy, resolve_router_ports


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `router`."""
    parser = commands.add_parser(
        "router",
        help="run the router of a cluster on several hosts",
        description="Run the router of a cluster on several hosts until SIGTERM: its fronts, and the registry where "
        "workers announce themselves. GET /health is 200 when it can serve a request, GET /livez as long as it runs. "
        "After SIGTERM it is unready at once, lets open requests finish for `drain_timeout_s`, and ends with code 0.",
        argument_default=flags.UNSET,
    )
    flags.add_config(parser)
    flags.add_model(parser)
    flags.add_addresses(parser)
    flags.add_policy(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check what can be checked, then serve until a signal."""
    config = resolve_router_ports(flags.read_settings(arguments))
    require_model(config.model_folder)
    require_policy(config.policy_file)
    # Imported here: slow (gRPC, aiohttp).
    from cluster.standalone import serve_router

    serve_router(config)
    return 0
