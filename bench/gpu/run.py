"""Everything that a GPU has to decide, in one run of less than ten minutes: is it right, is it exact, how fast is it.

    python -m bench.gpu.run [--model FOLDER | --random] [--out report.json]

Each section is a line here and an entry in the report, which is written anew after each; one that fails is a failure
of the run, and the rest go on. Sections after --minutes are left out, and the report says which.
Needs this repository, torch for the GPU, Triton, safetensors and numpy; no network, and nothing of us installed.
UNRUN: no GPU has seen this script yet. `--device cpu --quick` runs the same code with a small model (tests/bench/).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

from bench.gpu import checks, timing
from bench.gpu.machine import Machine, describe, open_device
from cluster.folders import default_model_folder


@dataclass(frozen=True)
class Sizes:
    """How much is computed."""

    dtypes: tuple[str, ...]
    num_blocks: int
    max_graph_sequences: int
    prompts: tuple[int, ...]
    invariance_prompts: tuple[int, ...]
    invariance_chunks: tuple[int, ...]
    golden_tokens: int
    decode_batches: tuple[int, ...]
    decode_context: int
    prefills: tuple[int, ...]
    rounds: int
    copy_mib: int
    matrix_size: int


FULL: Final = Sizes(
    dtypes=("float32", "bfloat16"),
    num_blocks=4608,
    max_graph_sequences=128,
    prompts=(1, 17, 130, 700),
    invariance_prompts=(1, 3, 16, 17, 100, 129, 300),
    invariance_chunks=(16, 37, 200),
    golden_tokens=64,
    decode_batches=(1, 8, 32, 128),
    decode_context=512,
    prefills=(128, 1024, 2048),
    rounds=10,
    copy_mib=2048,
    matrix_size=8192,
)
QUICK: Final = Sizes(
    dtypes=("bfloat16",),
    num_blocks=48,
    max_graph_sequences=4,
    prompts=(1, 18),
    invariance_prompts=(2, 17),
    invariance_chunks=(16,),
    golden_tokens=2,
    decode_batches=(1, 2),
    decode_context=32,
    prefills=(24,),
    rounds=1,
    copy_mib=1,
    matrix_size=64,
)


class Report:
    """Sections by name, on disk after each."""

    def __init__(self, path: Path, minutes: float) -> None:
        self._path = path
        self._start_s = time.monotonic()
        self._end_s = self._start_s + 60 * minutes
        self.sections: dict[str, Any] = {}
        self.failed: list[str] = []

    def section(self, name: str, figures: Callable[..., dict[str, Any]], *arguments: Any) -> None:
        """Run one, unless the time is over. Whatever it raises is kept: one run on a GPU should tell all it can."""
        start_s = time.monotonic()
        if start_s > self._end_s:
            self.sections[name] = {"left_out": "no time"}
        else:
            try:
                self.sections[name] = figures(*arguments)
            except Exception as error:
                self.failed.append(name)
                self.sections[name] = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
            self.sections[name]["seconds"] = time.monotonic() - start_s
        shown = {key: value for key, value in self.sections[name].items() if key != "trace"}
        print(f"[{time.monotonic() - self._start_s:6.1f} s] {name}: {json.dumps(_rounded(shown))}", flush=True)
        self._path.write_text(json.dumps({"failed": self.failed, "sections": self.sections}, indent=1))


def check_sections(report: Report, machine: Machine, sizes: Sizes, golden: bool) -> None:
    """Is it right?"""
    for dtype in sizes.dtypes:
        report.section(f"kernel {dtype}", checks.check_kernel, machine, dtype)
    for dtype in sizes.dtypes:
        report.section(f"logits {dtype}", checks.check_logits, machine, dtype, sizes.prompts)
        report.section(f"graphs {dtype}", checks.check_graphs, machine, dtype)
        if golden:
            report.section(f"golden {dtype}", checks.check_golden, machine, dtype, sizes.golden_tokens)


def timing_sections(report: Report, machine: Machine, sizes: Sizes) -> None:
    """How fast is it, and how much slower where it is exact?"""
    for dtype in reversed(sizes.dtypes):
        floors = cache(partial(timing.Floors, machine, dtype, sizes.copy_mib, sizes.matrix_size))
        report.section(f"floors {dtype}", timing.floor_figures, floors)
        for exact in (False, True):
            mode = f"{dtype}{' exact' if exact else ''}"
            batches, context, rounds = sizes.decode_batches, sizes.decode_context, sizes.rounds
            report.section(
                f"decode {mode}", timing.time_decode, machine, floors, dtype, exact, batches, context, rounds
            )
            report.section(
                f"prefill {mode}", timing.time_prefill, machine, floors, dtype, exact, sizes.prefills, rounds
            )
    report.section("profile", timing.profile_steps, machine, max(sizes.decode_batches), max(sizes.prefills))
    report.section("host copies", timing.time_host_copies, machine, sizes.num_blocks // 2, sizes.rounds)


def exact_sections(report: Report, machine: Machine, sizes: Sizes) -> None:
    """Is the exact mode exact?"""
    for dtype in sizes.dtypes:
        report.section(
            f"exact {dtype}",
            checks.check_invariance,
            machine,
            dtype,
            sizes.invariance_prompts,
            sizes.invariance_chunks,
        )


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def default_model() -> Path:
    """The default model's folder, made here from its package, which takes gguf: else bring one."""
    try:
        from engine.gguf_import import import_default_model
    except ImportError as error:
        raise SystemExit(f"{error}: give --model FOLDER, or --random") from None
    return import_default_model(default_model_folder(), print)


def parse_options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder of the default model (default: made from its package)")
    parser.add_argument("--random", action="store_true", help="random weights of its sizes: no golden tokens")
    parser.add_argument("--no-golden", action="store_true", help="--model is another model")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="(default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: that it runs, not what comes out")
    parser.add_argument("--minutes", type=float, default=8.0, help="no section starts later (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("gpu_report.json"), help="(default: %(default)s)")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """0 if nothing failed."""
    options = parse_options(arguments)
    sizes = QUICK if options.quick else FULL
    folder = None if options.random else options.model or default_model()
    report = Report(options.out, options.minutes)
    device = open_device(options.device)
    report.section("machine", describe, device)
    machine = Machine(device, folder, sizes.num_blocks, sizes.max_graph_sequences)
    check_sections(report, machine, sizes, golden=not (options.random or options.no_golden))
    timing_sections(report, machine, sizes)
    exact_sections(report, machine, sizes)
    print(f"failed: {', '.join(report.failed) or 'nothing'}; report: {options.out}")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
