"""Tandem beside other engines on one core: the same prompts, in turn, in one run.

    python -m bench.engine [--vllm-python PATH] [--llama-python PATH] [--rounds 5] [--minutes 12]

Each engine runs in its own process and its own python (bench/README.md says how to make them), all pinned to one core;
one computes at a time, and the rounds of each case go through all of them in turn. Scheduler and sampler are included;
HTTP, tokenizer and text are not. Prompts are random ids, never twice the same, and prefix caches are off or never hit.

A figure is the median of the rounds (least-most), its share of the floor that this core allows, measured in the same
rounds (bench/engine_kernels.py), and its ratio to Tandem's. Seconds are those of the engine's process on the core, so
that other processes which take turns on it do not count (--clock wall: those of the wall). The last row is their share
of the wall's: an engine that waits for something has less than the others.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench.engine_kernels import DECODE_BATCHES, DECODE_CONTEXT, PREFILL_TOKENS, Floors
from bench.engines.contestants import REPOSITORY, contestants, executable
from bench.engines.driver import STREAM_MAX_TOKENS, Settings
from bench.engines.match import MIXED_PROMPT_TOKENS, Match, running
from cluster.folders import default_model_folder
from engine.dtypes import DTYPES
from engine.gguf_import import import_default_model
from engine.model_config import ModelConfig

MIXED_STREAMS: Final = 8
CPU_CLOCK: Final = {"wall": 0, "cpu": 1}  # place in a driver's [wall, cpu]


def run_cases(match: Match, rounds: int, steps: int, minutes: float) -> None:
    """All cases, each with its part of the time."""
    start_s = time.monotonic()

    def until(part: float) -> float:
        return start_s + 60 * minutes * part

    for tokens, part in zip(PREFILL_TOKENS, (0.03, 0.15, 0.35), strict=True):
        for _ in match.rounds(rounds, until(part)):
            match.prefill(tokens)
    for batch, part in zip(reversed(DECODE_BATCHES), (0.7, 0.8, 1.0), strict=True):
        match.fill(batch, DECODE_CONTEXT - rounds * steps // 2)
        for _ in match.rounds(rounds, until(part)):
            match.decode(batch, steps)
        if batch == MIXED_STREAMS:
            for _ in match.rounds(rounds, until(0.95)):
                match.mixed()


def percentile(values: list[float], percent: float) -> float:
    """The least value that `percent` of all do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


@dataclass
class Row:
    """One case: for each engine a figure, how it is spread, and what the floor allows (0: unknown)."""

    title: str
    values: dict[str, float]
    notes: dict[str, str] = field(default_factory=dict)
    floor: float = 0.0


def rate_rows(match: Match) -> list[Row]:
    rows = []
    for kind, sizes in (("prefill", PREFILL_TOKENS), ("decode", DECODE_BATCHES)):
        for size in sizes:
            title = f"{kind} {size}, tok/s"
            cells = match.figures[title]
            floor = statistics.median(size / getattr(floors, f"{kind}_s")(size) for floors in match.floors[title])
            notes = {name: f" ({_number(min(values))}-{_number(max(values))})" for name, values in cells.items()}
            rows.append(Row(title, {name: statistics.median(values) for name, values in cells.items()}, notes, floor))
    return rows


def latency_rows(match: Match) -> list[Row]:
    rows = []
    for case in ("TTFT", "ITL"):
        for percent in (50, 99):
            values = {name: 1e3 * percentile(seconds, percent) for name, seconds in match.figures[case].items()}
            rows.append(Row(f"{case} P{percent}, ms", values))
    return rows


def print_table(rows: list[Row], names: list[str]) -> None:
    """A cell: figure (least-most), share of the floor, ratio to the first engine's."""
    print(f"\n| | floor | {' | '.join(names)} |\n{'| --- ' * (len(names) + 2)}|")
    for row in rows:
        cells = [_cell(row, name, names[0]) for name in names]
        print(f"| {row.title} | {f'{row.floor:.0f}' if row.floor else '-'} | {' | '.join(cells)} |")


def _cell(row: Row, name: str, first: str) -> str:
    if name not in row.values:
        return "-"
    value = row.values[name]
    share = f", {value / row.floor:.0%}" if row.floor else ""
    ratio = f", {value / row.values[first]:.2f}x" if first in row.values else ""
    return f"{_number(value)}{row.notes.get(name, '')}{share}{ratio}"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def machine_line() -> str:
    text = Path("/proc/cpuinfo").read_text()
    model = next((line.split(":")[1].strip() for line in text.splitlines() if line.startswith("model name")), "unknown")
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    git = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    return f"{when} UTC, commit {commit}, {model}, {os.cpu_count()} cores, load average {load}"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own = sys.executable if importlib.util.find_spec("transformers") else ""
    for name, fallback in (("vllm", ""), ("llama", ""), ("transformers", own)):
        default = os.environ.get(f"TANDEM_BENCH_{name.upper()}_PYTHON", fallback)
        parser.add_argument(
            f"--{name}-python", type=executable, default=default, help="its python (default: %(default)r)"
        )
    parser.add_argument("--vllm-dtype", choices=DTYPES, help="where it is faster with another (default: --dtype)")
    parser.add_argument("--llama-types", default="q4_1,bf16", help="of q4_1 (as shipped), q4_0, bf16 (%(default)s)")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="of all but llama.cpp (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="for each figure (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=16, help="decode steps in a round (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=12.0, help="no second round starts later (%(default)s)")
    parser.add_argument("--token-budget", type=int, default=256, help="of a step; 0: each one's default (%(default)s)")
    parser.add_argument("--max-decode-slowdown", type=float, default=1000.0, help="Tandem's (%(default)s: off)")
    parser.add_argument("--temperature", type=float, default=0.0, help="(default: %(default)s, greedy)")
    parser.add_argument("--clock", default="cpu", choices=CPU_CLOCK, help="(default: %(default)s)")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="(default: the last)")
    return parser.parse_args()


def kv_tokens(rounds: int, steps: int) -> int:
    """Room for the largest batch to the end of its rounds, and for a prompt beside it."""
    tokens = max(DECODE_BATCHES) * (DECODE_CONTEXT + rounds * steps // 2 + 2 * 16) + MIXED_PROMPT_TOKENS
    return -(-tokens // 256) * 256


def main() -> None:
    options = parse_options()
    os.sched_setaffinity(0, {options.core})  # the engines' processes inherit it
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    folder = import_default_model(default_model_folder(), print)
    config = ModelConfig.load(folder)
    settings = Settings(
        model=str(folder),
        dtype=options.dtype,
        token_budget=options.token_budget,
        kv_tokens=kv_tokens(options.rounds, options.steps),
        max_context=2 * STREAM_MAX_TOKENS,
        max_sequences=max(DECODE_BATCHES) + 2,
        max_decode_slowdown=options.max_decode_slowdown,
        temperature=options.temperature,
        vocab_size=config.vocab_size,
    )
    print(machine_line())
    print(f"core {options.core}, {options.clock} clock, {settings}", flush=True)
    match = Match(lambda: Floors(config, DTYPES[options.dtype]), CPU_CLOCK[options.clock])
    with running(match, contestants(options, settings)) as load_bytes:
        run_cases(match, options.rounds, options.steps, options.minutes)
        peaks = {name: driver.peak_bytes() / 2**20 for name, driver in match.drivers.items()}
        shares = {name: 100 * driver.core_share for name, driver in match.drivers.items()}
        rows = [
            *rate_rows(match),
            *latency_rows(match),
            Row("peak memory while serving, MiB", peaks),
            Row("peak memory of the load, MiB", {name: load_bytes[name] / 2**20 for name in match.drivers}),
            Row("on the core, % of the wall", shares),
        ]
        print_table(rows, list(match.drivers))
    print(f"\n{machine_line()}")


if __name__ == "__main__":
    main()
