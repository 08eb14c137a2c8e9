"""What the router costs.

    python -m bench.router [decisions|requests|tokens|traces] [--smg-python PEERS/smg/bin/python]

decisions: choosing workers; bench/router/decisions.py. requests: added TTFT and CPU per request, tokens: tokens per
second through one router on one core, both of real router processes; bench/router/streams.py. traces: CPU with traces
off, of 1 % and of all requests; bench/router/traces.py. Without smg's python
only ours are measured.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
from pathlib import Path

from bench.engines.contestants import executable
from bench.router.decisions import decisions
from bench.router.streams import requests, tokens
from bench.router.traces import traces


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("decisions", "requests", "tokens", "traces"), default="decisions")
    parser.add_argument("--smg-python", default=os.environ.get("TANDEM_BENCH_SMG_PYTHON"), help="see bench/README.md")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--stream-tokens", type=int, default=1000)
    arguments = parser.parse_args()
    smg_python: Path | None = arguments.smg_python and executable(arguments.smg_python)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    print(f"{commit}, load average {os.getloadavg()[0]:.1f}\n", flush=True)
    match arguments.what:
        case "decisions":
            decisions()
        case "requests":
            asyncio.run(requests(smg_python, arguments.rounds))
        case "tokens":
            asyncio.run(tokens(smg_python, arguments.rounds, arguments.streams, arguments.stream_tokens))
        case "traces":
            asyncio.run(traces(arguments.rounds, arguments.streams, arguments.stream_tokens))
    print(f"\nload average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
