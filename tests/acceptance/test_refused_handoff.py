"""The decode worker says no once the prompt is prefilled: every block that arrives is damaged, and none is taken.

A hand-off that its target refuses is seen by the router only after the prefill worker's first token, so the request
goes on elsewhere from there; nothing leaks, and what was computed again is in the usage.
"""

from __future__ import annotations

import json
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.golden import CASES
from tests.acceptance.running_cluster import RunningCluster, running_cluster
from tests.acceptance.test_faults import Streaming

PROSE = next(case for case in CASES if case.name == "prose_256")


@pytest.fixture(scope="module")
def damaging(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    settings = {"kv_faults": "corrupt_block=1", "kv_load_failure_policy": "fail", "lease_s": 2.0}
    with running_cluster(model_folder, tmp_path_factory.mktemp("damaging"), **settings) as cluster:
        yield cluster


def test_without_a_hand_off_nothing_is_wrong(damaging: RunningCluster) -> None:
    """The control."""
    answer = damaging.complete(list(PROSE.prompt_ids), max_tokens=16, tandem={"prefill": "local"}, cache_salt="local")
    assert tuple(answer["choices"][0]["token_ids"]) == PROSE.output_ids[:16]
    assert answer["usage"]["tandem"]["computed_tokens"] == len(PROSE.prompt_ids)


def test_a_request_that_nobody_takes_ends_with_its_reason_and_leaves_nothing(damaging: RunningCluster) -> None:
    """Its caller wants a hand-off. Each try gives the prefill worker's token, so the stream is as it should be."""
    fields = {"max_tokens": 64, "tandem": {"prefill": "remote"}}
    stream = Streaming(damaging, PROSE.prompt_ids, cache_salt="stream", **fields)
    stream.join(120)
    assert stream.error is not None and stream.error["code"] == "transfer_failed"
    assert "did not arrive whole" in stream.error["message"]
    assert 1 < len(stream.token_ids) < 64
    assert tuple(stream.token_ids) == PROSE.output_ids[: len(stream.token_ids)]
    with pytest.raises(urllib.error.HTTPError) as caught:
        damaging.complete(list(PROSE.prompt_ids), cache_salt="whole", **fields)
    assert caught.value.code == 503 and json.load(caught.value)["error"]["code"] == "transfer_failed"
    damaging.wait_idle()


def test_a_request_that_is_left_to_the_router_is_answered_elsewhere(damaging: RunningCluster) -> None:
    answer = damaging.complete(list(PROSE.prompt_ids), max_tokens=64, cache_salt="auto")
    assert tuple(answer["choices"][0]["token_ids"]) == PROSE.output_ids
    assert answer["usage"]["tandem"]["kv_blocks_moved"] == 0
    damaging.wait_idle()


def test_no_recompute_is_silent(damaging: RunningCluster) -> None:
    """Each try computes the prompt's last token again, at least. The other side, that without a fault each token is
    computed once: tests/acceptance/test_golden_modes.py."""
    fields = {"max_tokens": 4, "tandem": {"prefill": "remote"}, "cache_salt": "short"}
    answer = damaging.complete(list(PROSE.prompt_ids), **fields)
    assert tuple(answer["choices"][0]["token_ids"]) == PROSE.output_ids[:4]
    assert answer["usage"]["tandem"]["computed_tokens"] >= len(PROSE.prompt_ids) + 3
    damaging.wait_idle()
