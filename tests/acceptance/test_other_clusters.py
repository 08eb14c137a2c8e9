"""Clusters of another shape: bfloat16. Aggregated ones: tests/acceptance/test_prefix_routing.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.acceptance.golden import CASES
from tests.acceptance.running_cluster import running_cluster

PROSE = next(case for case in CASES if case.name == "prose_256")


@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_parity_holds_in_another_dtype(model_folder: Path, tmp_path: Path, dtype: str) -> None:
    """Not golden, which is float32's: equal to itself, wherever the prompt is prefilled and however it is drawn."""
    with running_cluster(model_folder, tmp_path, "--dtype", dtype, token_budget=64) as cluster:
        for number, sampling in enumerate([{}, {"temperature": 1.0, "seed": 7}]):
            remote, local = (
                cluster.complete(
                    list(PROSE.prompt_ids),
                    max_tokens=48,
                    cache_salt=f"{where}-{number}",
                    tandem={"prefill": where},
                    **sampling,
                )
                for where in ("remote", "local")
            )
            assert remote["choices"] == local["choices"]
            assert remote["usage"]["tandem"]["kv_blocks_moved"] == len(PROSE.prompt_ids) // 16
        cluster.wait_idle()
