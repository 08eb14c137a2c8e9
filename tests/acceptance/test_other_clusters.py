"""Clusters of another shape: aggregated, and bfloat16."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest

from tests.acceptance.golden import CASES
from tests.acceptance.running_cluster import running_cluster

SHORT = next(case for case in CASES if case.name == "short")
PROSE = next(case for case in CASES if case.name == "prose_256")


def test_aggregated_one_worker_does_both(model_folder: Path, tmp_path: Path) -> None:
    with running_cluster(model_folder, tmp_path, "--aggregated") as cluster:
        assert list(cluster.workers()) == ["decode-0"]
        with urllib.request.urlopen(f"{cluster.http}/health", timeout=10) as response:
            assert json.load(response) == {"status": "ok"}
        answer = cluster.complete(list(SHORT.prompt_ids), max_tokens=64)
        assert tuple(answer["choices"][0]["token_ids"]) == SHORT.output_ids
        assert answer["usage"]["tandem"]["kv_blocks_moved"] == 0
        cluster.wait_idle()


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
