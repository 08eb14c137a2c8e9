"""Where a prompt is prefilled never changes what is said: sampled, stopped, shortest and longest requests alike."""

from __future__ import annotations

import itertools
import math
import statistics
from typing import Any

import pytest

from core.request import SamplingParams
from tests.acceptance.golden import CASES
from tests.acceptance.running_cluster import RunningCluster

STORY = next(case for case in CASES if case.name == "story")
SALTS = itertools.count()


def both_ways(cluster: RunningCluster, **fields: Any) -> dict[str, Any]:
    """The answer, equal for a remote and a local prefill; caches cannot help, as the salts differ."""
    fields = {"prompt": list(STORY.prompt_ids), "max_tokens": 40, **fields}
    remote, local = (
        cluster.complete(cache_salt=f"parity-{next(SALTS)}", tandem={"prefill": where}, **fields)
        for where in ("remote", "local")
    )
    assert remote["usage"]["tandem"]["kv_blocks_moved"] > 0 or fields["max_tokens"] == 1
    assert local["usage"]["tandem"]["kv_blocks_moved"] == 0
    assert remote["choices"] == local["choices"]
    assert remote["usage"]["completion_tokens"] == local["usage"]["completion_tokens"]
    return remote["choices"][0]


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0.7, "top_p": 0.8, "seed": 2},
        {"temperature": 1.5, "top_k": 5, "seed": 3},
    ],
)
def test_sampled_with_a_seed(pair: RunningCluster, sampling: dict[str, Any]) -> None:
    first = both_ways(pair, **sampling)
    assert first["token_ids"] != list(STORY.output_ids[:40])  # it is not greedy after all
    other = both_ways(pair, **{**sampling, "seed": 77})
    assert other["token_ids"] != first["token_ids"]


def test_sampled_choices_are_the_single_requests_with_their_seeds(pair: RunningCluster) -> None:
    sampling: dict[str, Any] = {"temperature": 1.0, "max_tokens": 24, "logprobs": 1}
    both_ways(pair, seed=9, n=4, **sampling)
    together = pair.complete(list(STORY.prompt_ids), seed=9, n=4, tandem={"prefill": "remote"}, **sampling)
    for choice in together["choices"]:
        seed = SamplingParams(seed=9).for_choice(choice["index"]).seed
        alone = pair.complete(list(STORY.prompt_ids), seed=seed, tandem={"prefill": "local"}, **sampling)
        assert {**alone["choices"][0], "index": choice["index"]} == choice
    assert len({tuple(choice["token_ids"]) for choice in together["choices"]}) == 4


def test_best_of_is_the_most_probable_of_what_n_gives(pair: RunningCluster) -> None:
    sampling: dict[str, Any] = {"temperature": 1.5, "max_tokens": 8, "seed": 4}
    best = pair.complete(list(STORY.prompt_ids), best_of=3, **sampling)
    every = pair.complete(list(STORY.prompt_ids), n=3, logprobs=0, **sampling)
    score = {choice["text"]: statistics.fmean(choice["logprobs"]["token_logprobs"]) for choice in every["choices"]}
    assert [choice["text"] for choice in best["choices"]] == [max(score, key=lambda text: score[text])]
    assert best["usage"]["completion_tokens"] == every["usage"]["completion_tokens"]


def test_penalties_and_biases(pair: RunningCluster) -> None:
    """Sampled and greedy; the first token, which the prefill worker draws, is penalised for the prompt's tokens."""
    banned, forced = STORY.output_ids[0], STORY.output_ids[5]
    penalties: dict[str, Any] = {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.7}
    sampled = both_ways(
        pair, temperature=1.2, seed=5, min_p=0.02, logit_bias={str(banned): -100}, max_tokens=12, **penalties
    )
    assert banned not in sampled["token_ids"]
    greedy = both_ways(pair, max_tokens=12, **penalties)
    assert greedy["token_ids"] != list(STORY.output_ids[:12])
    only = both_ways(pair, max_tokens=4, logit_bias={str(forced): 100})
    assert only["token_ids"] == [forced] * 4


def test_prompt_logprobs(pair: RunningCluster) -> None:
    """The prefill worker's are the decode worker's, to the bit, and echoed they are the same numbers."""
    prompt = list(STORY.prompt_ids)
    choice = both_ways(pair, max_tokens=3, prompt_logprobs=2, echo=True, logprobs=1)
    assert choice["token_ids"] == list(STORY.output_ids[:3])
    assert choice["prompt_logprobs"][0] is None and len(choice["prompt_logprobs"]) == len(prompt)
    own = [entry[str(token_id)] for token_id, entry in zip(prompt[1:], choice["prompt_logprobs"][1:], strict=True)]
    assert all(entry["rank"] >= 1 and entry["logprob"] < 0 for entry in own)
    echoed = choice["logprobs"]["token_logprobs"]
    assert echoed[: len(prompt)] == [None, *(entry["logprob"] for entry in own)]
    assert len(echoed) == len(prompt) + 3


def test_logprobs(pair: RunningCluster) -> None:
    """Equal to the bit, the first position's from the prefill worker; greedy draws the best."""
    choice = both_ways(pair, max_tokens=12, logprobs=5)
    assert choice["token_ids"] == list(STORY.output_ids[:12])
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    for index, token in enumerate(logprobs["tokens"]):
        top = logprobs["top_logprobs"][index]
        assert logprobs["token_logprobs"][index] == top[token] == max(top.values()) < 0
        assert len(top) == 5 and sum(math.exp(value) for value in top.values()) < 1
        assert choice["text"].startswith(token, logprobs["text_offset"][index])
    penalised = both_ways(pair, max_tokens=1, logprobs=5, repetition_penalty=1.4, temperature=2, seed=3)
    assert penalised["logprobs"]["top_logprobs"][0].items() >= logprobs["top_logprobs"][0].items()


def test_stop_strings_end_at_the_same_token(pair: RunningCluster) -> None:
    words = STORY.output_text.split()
    stop = f"{words[3]} {words[4]}"  # spans tokens
    choice = both_ways(pair, stop=[stop, "never there"])
    assert choice["finish_reason"] == "stop"
    assert choice["text"] == STORY.output_text[: STORY.output_text.index(stop)]
    assert choice["token_ids"] == list(STORY.output_ids[: len(choice["token_ids"])])
    assert len(choice["token_ids"]) < 40


def test_stop_ids_and_min_tokens(pair: RunningCluster) -> None:
    stop_id = STORY.output_ids[4]
    assert STORY.output_ids.index(stop_id) <= 4
    early = both_ways(pair, stop_token_ids=[stop_id])
    assert early["token_ids"] == list(STORY.output_ids[: STORY.output_ids.index(stop_id) + 1])
    late = both_ways(pair, stop_token_ids=[stop_id], min_tokens=12)
    assert len(late["token_ids"]) >= 12 and stop_id not in late["token_ids"][:11]


@pytest.mark.parametrize("length", [1, 2])
def test_the_shortest_outputs(pair: RunningCluster, length: int) -> None:
    choice = both_ways(pair, max_tokens=length)
    assert choice["token_ids"] == list(STORY.output_ids[:length])
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("num_prompt_tokens", [15, 16, 17, 32])
def test_prompts_around_a_block_boundary(pair: RunningCluster, num_prompt_tokens: int) -> None:
    prose = next(case for case in CASES if case.name == "prose_256")
    both_ways(pair, prompt=list(prose.prompt_ids[:num_prompt_tokens]), max_tokens=20)
