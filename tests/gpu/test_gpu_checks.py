"""The checks of bench/gpu/run.py on a real GPU: TRITON_INTERPRET=0 python -m pytest -m gpu tests/gpu. Unrun so far."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.gpu import checks
from bench.gpu.machine import Machine, open_device
from bench.gpu.run import FULL

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def machine(model_folder: Path) -> Machine:
    """Without a GPU, or with an interpreted kernel, this fails: nothing here is skipped."""
    assert os.environ["TRITON_INTERPRET"] == "0"
    return Machine(open_device("cuda"), model_folder, FULL.num_blocks, FULL.max_graph_sequences)


@pytest.mark.parametrize("dtype", FULL.dtypes)
def test_the_kernel_equals_the_reference(machine: Machine, dtype: str) -> None:
    assert checks.check_kernel(machine, dtype)


@pytest.mark.parametrize("dtype", FULL.dtypes)
def test_logits_are_near_those_of_the_cpu(machine: Machine, dtype: str) -> None:
    assert checks.check_logits(machine, dtype, FULL.prompts)


@pytest.mark.parametrize("dtype", FULL.dtypes)
def test_the_golden_tokens_hold_up_to_the_first_narrow_gap(machine: Machine, dtype: str) -> None:
    assert checks.check_golden(machine, dtype, FULL.golden_tokens)


@pytest.mark.parametrize("dtype", FULL.dtypes)
def test_graphs_equal_eager_steps(machine: Machine, dtype: str) -> None:
    assert checks.check_graphs(machine, dtype)


@pytest.mark.parametrize("dtype", FULL.dtypes)
def test_the_exact_mode_is_exact(machine: Machine, dtype: str) -> None:
    assert checks.check_invariance(machine, dtype, FULL.invariance_prompts, FULL.invariance_chunks)
