"""LoRA adapters through a whole cluster: beside each other and the model, over a hand-off, with their own caches."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from engine.cpu.runner import CpuModelRunner
from tests.acceptance.conftest import ADAPTERS
from tests.acceptance.golden import CASES
from tests.acceptance.running_cluster import RunningCluster
from tests.engine.token_stream import generate

STORY = next(case for case in CASES if case.name == "story")
NUM_TOKENS = 24


def ask(cluster: RunningCluster, name: str, salt: str, prefill: str = "remote") -> dict[str, Any]:
    return cluster.complete(
        list(STORY.prompt_ids),
        model=name or cluster.model,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        cache_salt=salt,
        tandem={"prefill": prefill},
    )


def test_streams_of_model_and_adapters_say_what_one_engine_says(pair: RunningCluster, model_folder: Path) -> None:
    names = ["", *ADAPTERS]
    folders = {name: pair.folder / "adapters" / name for name in ADAPTERS}
    runner = CpuModelRunner.load(model_folder, "float32", num_blocks=64, adapters=folders)
    expected = [generate(runner, [STORY.prompt_ids], [NUM_TOKENS], 64, (name,))[0] for name in names]
    assert expected[0] == list(STORY.output_ids[:NUM_TOKENS])
    assert len({tuple(tokens) for tokens in expected}) == len(names)
    with ThreadPoolExecutor(2 * len(names)) as pool:
        asked = [
            pool.submit(ask, pair, name, f"adapters-{where}", where) for where in ("remote", "local") for name in names
        ]
        answers = [item.result() for item in asked]
    for index, answer in enumerate(answers):
        assert answer["choices"][0]["token_ids"] == expected[index % len(names)], (index, answer["model"])
        assert answer["model"] == (names[index % len(names)] or pair.model)
    assert all(answer["usage"]["tandem"]["kv_blocks_moved"] for answer in answers[: len(names)])
    pair.wait_idle()


def test_prefix_hits_stay_within_an_adapter(pair: RunningCluster) -> None:
    for name in ("", *ADAPTERS):
        first, second = (ask(pair, name, "adapter-hits") for _ in range(2))
        assert first["usage"]["tandem"]["computed_tokens"] == len(STORY.prompt_ids)
        assert second["usage"]["tandem"]["computed_tokens"] < 17
        assert first["choices"] == second["choices"]
