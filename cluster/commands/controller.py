"""`tandem controller`: keeps the workers of a cluster on several hosts."""

from __future__ import annotations

import argparse

from cluster.commands import flags
from core.errors import BadRequest


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `controller`."""
    parser = commands.add_parser(
        "controller",
        help="keep the workers of a cluster on several hosts",
        description="Join a Ray, keep the wanted workers running on its hosts until SIGTERM, and tell the router who "
        "died. A prefill worker takes one `tandem_prefill` of a host's custom resources, a decode worker one "
        "`tandem_decode`. Needs a Ray node on this host, and RAY_AUTH_TOKEN unless RAY_AUTH_MODE is `disabled`. GET "
        "/readyz on `controller_health_port` is 200 when every wanted worker is READY, GET /livez as long as it runs. "
        "After SIGTERM it drains the workers for `drain_timeout_s`, ends them, and ends with code 0.",
        argument_default=flags.UNSET,
    )
    flags.add_config(parser)
    flags.add_model(parser)
    flags.add_workers(parser)
    flags.add_controller(parser)
    parser.add_argument("--ray-address", metavar="HOST:PORT", help="the Ray to join")
    parser.add_argument("--router-host", metavar="HOST", help="where workers reach the registry")
    flags.add_flag(parser, "registry_port", "its port", type=int, metavar="PORT")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Keep the workers until a signal."""
    config = flags.read_settings(arguments)
    if not config.ray_address:
        raise BadRequest("ray_address", "must be set: host:port of the Ray to join")
    if not config.registry_port:
        raise BadRequest("registry_port", "must be set: nobody says which one the router took")
    # Imported here: slow (gRPC, aiohttp).
    from cluster.standalone import serve_controller

    serve_controller(config)
    return 0
