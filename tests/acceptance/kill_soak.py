"""Kill a random worker again and again under 32 streams: none may fail, and each says what it says undisturbed.

    python -m tests.acceptance.kill_soak [--seconds 120] [--every 5] [--streams 32] [--seed N]

1. `tandem up` with 2 prefill and 2 decode workers; every case is asked once, undisturbed.
2. Clients stream without a pause, half over HTTP and half over gRPC; each answer is compared with its undisturbed one.
3. Every few seconds a SIGKILL ends one of the workers that serve, drawn by the seed, back or not.
4. All streams end; every worker is ready and paired again; no block is used, quarantined or orphaned.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import re
import signal
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import grpc

from cluster.folders import default_model_folder
from engine.gguf_import import import_default_model
from tests.acceptance.running_cluster import RunningCluster, running_cluster
from tests.acceptance.soak_streams import LIMIT_S, Case, Clients, Said, StreamFailed, first_difference, make_cases

FLAGS = ("--prefill", "2", "--decode", "2")
FRONTS = ("http", "grpc")
MAX_GAP_S = 60.0
SETTLE_S = 90.0
SAY_EVERY_S = 10.0
QUIET_GAUGES = (
    'tandem_worker_blocks{state="used"}',
    'tandem_worker_blocks{state="quarantined"}',
    "tandem_worker_orphaned_blocks",
    "tandem_kv_handoffs_open",
    "tandem_worker_open_requests",
)

Key = tuple[str, str]  # front, name of the case


@dataclass(frozen=True)
class Load:
    """min_serving: a kill waits until so many workers serve."""

    num_kills: int
    every_s: float
    num_streams: int
    max_tokens: int = 100
    min_serving: int = 1


@dataclass
class Report:
    """What a run saw. Each line of `wrong` is a request that failed or said something else."""

    answers: int = 0
    tokens: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)  # the longest of each stream, after its first piece
    away_s: list[float] = field(default_factory=list)  # from a kill until the next life is ready
    wrong: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        return [
            f"answers: {self.answers} ({self.tokens} tokens), each equal to its undisturbed run: {not self.wrong}",
            f"kills: {sum(self.kills.values())} {dict(sorted(self.kills.items()))}",
            f"first token, s: {percentiles(self.first_s)}",
            f"longest gap of a stream, s: {percentiles(self.gaps_s)}",
            f"killed worker replaced and ready after, s: {percentiles(self.away_s)}",
        ]


def percentiles(values: list[float]) -> str:
    ranked = sorted(values) or [float("nan")]
    at = {name: ranked[min(len(ranked) - 1, int(share * len(ranked)))] for name, share in (("p50", 0.5), ("p99", 0.99))}
    return f"p50 {at['p50']:.2f}, p99 {at['p99']:.2f}, max {ranked[-1]:.2f} (of {len(values)})"


async def soak(cluster: RunningCluster, load: Load, seed: int, say: Callable[[str], None]) -> Report:
    """One run against a cluster that is up. Raises AssertionError when it does not come back to rest."""
    cases = make_cases(load.max_tokens)
    report = Report()
    options = (("grpc.enable_http_proxy", 0),)
    timeout = aiohttp.ClientTimeout(total=LIMIT_S)
    async with (
        aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http,
        grpc.aio.insecure_channel(cluster.grpc, options=options) as channel,
    ):
        clients = Clients(cluster, http, channel)
        keys = [(front, case) for front in FRONTS for case in cases]
        begun_s = time.monotonic()
        said = await asyncio.gather(*(clients.say(front, case, f"undisturbed-{front}") for front, case in keys))
        undisturbed = {(front, case.name): item for (front, case), item in zip(keys, said, strict=True)}
        say(f"{len(undisturbed)} requests asked undisturbed, in {time.monotonic() - begun_s:.1f} s")
        over = asyncio.Event()
        streams = [
            asyncio.create_task(_stream(number, clients, cases, undisturbed, over, report))
            for number in range(load.num_streams)
        ]
        talking = asyncio.create_task(_talk(report, say))
        try:
            await asyncio.to_thread(_kill_all, cluster, load, random.Random(seed), report, say)
            over.set()
            await asyncio.gather(*streams)
        finally:
            talking.cancel()
    await asyncio.to_thread(_rest, cluster)
    return report


async def _stream(
    number: int,
    clients: Clients,
    cases: list[Case],
    undisturbed: dict[Key, Said],
    over: asyncio.Event,
    report: Report,
) -> None:
    """One client: a request after the other, each of another kind than its neighbours'."""
    front = FRONTS[number % len(FRONTS)]
    turn = number // len(FRONTS)
    while not over.is_set():
        case = cases[turn % len(cases)]
        turn += 1
        try:
            said = await clients.say(front, case, f"{number}-{turn}")
        except StreamFailed as error:
            report.wrong.append(f"{front}, {case.name}: failed: {error}")
            continue
        difference = first_difference(undisturbed[front, case.name], said)
        if difference:
            report.wrong.append(f"{front}, {case.name}: {difference}")
        report.answers += 1
        report.tokens += sum(len(choice.token_ids) for choice in said.choices.values())
        report.first_s.append(said.gaps_s[0])
        report.gaps_s.append(max(said.gaps_s[1:], default=0.0))


async def _talk(report: Report, say: Callable[[str], None]) -> None:
    while True:
        await asyncio.sleep(SAY_EVERY_S)
        say(f"{report.answers} answers, {sum(report.kills.values())} kills, {len(report.wrong)} wrong")


def _kill_all(
    cluster: RunningCluster, load: Load, draw: random.Random, report: Report, say: Callable[[str], None]
) -> None:
    """Ends one of the workers that serve after the other; returns once all are back."""
    killed_s: dict[str, float] = {}
    dead: set[str] = set()  # incarnations
    kill_at_s = time.monotonic() + load.every_s
    while len(dead) < load.num_kills or killed_s:
        now_s = time.monotonic()
        serving = {
            name: item.worker.ref.incarnation
            for name, item in cluster.workers().items()
            if item.life == "ready" and item.worker.ref.incarnation not in dead
        }
        for name in set(serving) & set(killed_s):
            report.away_s.append(now_s - killed_s.pop(name))
        assert now_s < kill_at_s + SETTLE_S, f"not replaced: {sorted(killed_s)}"
        if len(dead) < load.num_kills and now_s >= kill_at_s and len(serving) >= load.min_serving:
            kill_at_s = now_s + load.every_s
            name = draw.choice(sorted(serving))
            os.kill(cluster.worker_pid(name), signal.SIGKILL)
            dead.add(serving[name])
            killed_s[name] = now_s
            report.kills[name] += 1
            say(f"killed {name}; {len(serving) - 1} workers left")
        time.sleep(0.1)


def _rest(cluster: RunningCluster) -> None:
    """Every block is back, on workers and in their metrics. Raises AssertionError with what is not."""
    cluster.wait_idle(SETTLE_S)
    for name, item in cluster.workers().items():
        text = urllib.request.urlopen(f"http://{item.worker.metrics_address}/metrics", timeout=10).read().decode()
        values = dict(re.findall(r"^(\w+(?:\{[^}]*\})?) (\S+)$", text, re.MULTILINE))
        held = {gauge: values[gauge] for gauge in QUIET_GAUGES if float(values[gauge])}
        assert not held, f"{name}: {held}"
        assert float(values['tandem_worker_blocks{state="free"}']) == item.worker.num_blocks, name
    assert "\ntandem_open_requests 0.0\n" in cluster.metrics()


def verdict(report: Report) -> list[str]:
    """What keeps the run from passing."""
    waited_s = max(report.first_s + report.gaps_s, default=math.inf)
    return report.wrong + ([f"a client waited {waited_s:.0f} s"] if waited_s >= MAX_GAP_S else [])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--every", type=float, default=5.0)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="an empty folder for the logs")
    arguments = parser.parse_args()
    model = import_default_model(default_model_folder(), print)
    begun_s = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - begun_s:6.1f} s] {line}", flush=True)

    with (
        tempfile.TemporaryDirectory() as scratch,
        running_cluster(model, arguments.keep or Path(scratch), *FLAGS) as cluster,
    ):
        say("serving")
        num_kills = round(arguments.seconds / arguments.every)
        load = Load(num_kills, arguments.every, arguments.streams, arguments.max_tokens)
        report = asyncio.run(soak(cluster, load, arguments.seed, say))
    print("\n".join(report.lines()))
    lacks = verdict(report)
    for lack in lacks:
        print(f"  {lack}")
    command = (
        f"python -m tests.acceptance.kill_soak --seconds {arguments.seconds:g} --every {arguments.every:g}"
        f" --streams {arguments.streams} --max-tokens {arguments.max_tokens} --seed {arguments.seed}"
    )
    print(f"FAIL; reproduce: {command}" if lacks else "PASS: 0 requests failed, every stream equal, every block back")
    return 1 if lacks else 0


if __name__ == "__main__":
    sys.exit(main())
