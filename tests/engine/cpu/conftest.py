"""Compiled kernels and runners that the tests of the CPU engine share."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.cpu.build import find_compiler
from engine.cpu.runner import CpuModelRunner
from tests.engine.cpu.kernels import TARGETS, Kernels

NUM_BLOCKS = 512

if find_compiler() is None:
    tests = Path(__file__).parent.glob("test_*.py")
    collect_ignore = [path.name for path in tests if path.name != "test_load_runner.py"]


@pytest.fixture(scope="session", params=TARGETS.values(), ids=TARGETS.keys())
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Single kernels, compiled for this machine, and as lesser ones would compute them."""
    return Kernels(request.param)


@pytest.fixture(scope="session")
def default_cpu_runner(model_folder: Path) -> CpuModelRunner:
    """The default model in float32. Tests may leave anything finite in its pool."""
    return CpuModelRunner.load(model_folder, "float32", NUM_BLOCKS)
