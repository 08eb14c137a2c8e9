"""The golden cases, token-exact in float32, in every mode that must not change an answer; and what really moved.

The two longest prompts take most of the time: all cases are disaggregated, five and sixteen at once, other modes leave
one or both out.
In chunks, on two prefill workers: tests/acceptance/test_shared_prefix.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.acceptance.golden import CASES, MAX_TOKENS, GoldenCase
from tests.acceptance.running_cluster import RunningCluster

BLOCK_SIZE = 16
WITHOUT_1024 = [case for case in CASES if case.name != "prose_1024"]
UP_TO_400 = [case for case in CASES if len(case.prompt_ids) <= 400]


def ask(cluster: RunningCluster, case: GoldenCase, prefill: str, salt: str, **fields: Any) -> dict[str, Any]:
    fields = {"max_tokens": MAX_TOKENS, "cache_salt": salt, "tandem": {"prefill": prefill}, **fields}
    return cluster.complete(list(case.prompt_ids), **fields)


def assert_golden(answer: dict[str, Any], case: GoldenCase) -> None:
    for choice in answer["choices"]:
        assert tuple(choice["token_ids"]) == case.output_ids, case.name
        assert choice["finish_reason"] == case.finish_reason
        assert choice["text"] == case.output_text
    assert answer["usage"]["completion_tokens"] == len(answer["choices"]) * len(case.output_ids)


def assert_moved(cluster: RunningCluster, answer: dict[str, Any], case: GoldenCase, *, hit_tokens: int = 0) -> None:
    """Bytes moved are blocks times block bytes, and every prompt token was computed exactly once or hit."""
    (block_bytes,) = {item.worker.block_bytes for item in cluster.status().workers}
    usage = answer["usage"]["tandem"]
    num_blocks = -(-len(case.prompt_ids) // BLOCK_SIZE) - hit_tokens // BLOCK_SIZE
    assert usage["kv_blocks_moved"] == num_blocks
    assert usage["kv_bytes_moved"] == num_blocks * block_bytes > 0
    assert usage["computed_tokens"] == len(case.prompt_ids) - hit_tokens  # a silent recompute would count twice


def ask_all(
    cluster: RunningCluster, prefill: str, at_once: int, cases: Sequence[GoldenCase] = CASES, **fields: Any
) -> list[tuple[GoldenCase, dict[str, Any]]]:
    """Each case, `at_once` at a time, none of which can share a prefix with another mode's."""
    mode = f"{prefill}-{at_once}-{fields}"
    with ThreadPoolExecutor(at_once) as pool:
        answers = pool.map(lambda case: ask(cluster, case, prefill, f"{mode}-{case.name}", **fields), cases)
        return list(zip(cases, answers, strict=True))


def test_aggregated(pair: RunningCluster) -> None:
    for case, answer in ask_all(pair, "local", at_once=5, cases=WITHOUT_1024):
        assert_golden(answer, case)
        assert answer["usage"]["tandem"]["kv_bytes_moved"] == 0


def test_disaggregated_over_nixl(pair: RunningCluster) -> None:
    for case, answer in ask_all(pair, "remote", at_once=5):
        assert_golden(answer, case)
        assert_moved(pair, answer, case)


def test_four_greedy_choices_of_one_prefill_and_one_hand_off(pair: RunningCluster) -> None:
    for case, answer in ask_all(pair, "remote", at_once=5, cases=UP_TO_400, n=4):
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert_golden(answer, case)
        assert_moved(pair, answer, case)
    pair.wait_idle()


def test_disaggregated_with_the_prefix_already_cached(pair: RunningCluster) -> None:
    (case,) = [case for case in CASES if case.name == "shared_prefix_b"]
    shared = case.prompt_ids[:320]
    pair.complete([*shared, 504, 3575], max_tokens=4, cache_salt="shared", tandem={"prefill": "remote"})
    answer = ask(pair, case, "remote", "shared")
    assert_golden(answer, case)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(shared)
    assert_moved(pair, answer, case, hit_tokens=len(shared))


def test_disaggregated_with_16_in_flight_at_once(pair: RunningCluster) -> None:
    cases = [*CASES, CASES[0]]
    with ThreadPoolExecutor(len(cases)) as pool:
        answers = list(pool.map(lambda item: ask(pair, item[1], "remote", f"at-once-{item[0]}"), enumerate(cases)))
    for case, answer in zip(cases, answers, strict=True):
        assert_golden(answer, case)
        assert_moved(pair, answer, case)
    pair.wait_idle()
