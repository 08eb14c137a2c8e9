"""Compiled kernels and runners that the tests of the CPU engine share."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.cpu.build import FOR_THIS_MACHINE, PORTABLE, find_compiler
from engine.cpu.runner import CpuModelRunner
from tests.engine.cpu.kernels import Kernels

NUM_BLOCKS = 512

if find_compiler() is None:
    collect_ignore = ["test_kernels.py", "test_exactness.py", "test_fork_steps.py", "test_build.py"]


WITHOUT_BFLOAT16 = (*FOR_THIS_MACHINE, "-mno-avx512bf16")


@pytest.fixture(
    scope="session",
    params=[FOR_THIS_MACHINE, WITHOUT_BFLOAT16, PORTABLE],
    ids=["native", "without-bfloat16", "portable"],
)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Single kernels, compiled for this machine, without its bfloat16 instructions, and without any."""
    return Kernels(request.param)


@pytest.fixture(scope="session")
def default_cpu_runner(model_folder: Path) -> CpuModelRunner:
    """The default model in float32. Tests may leave anything finite in its pool."""
    return CpuModelRunner.load(model_folder, "float32", NUM_BLOCKS)
