"""A model that comes to a NaN for some tokens: their request ends, with an error, and leaves nothing behind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from core.request import GenerateRequest, SamplingParams, StopConditions
from engine.scheduler_config import SchedulerConfig
from engine.step import NOT_FINITE
from engine.weights import EMBEDDING, HEAD
from tests.engine.conftest import Load
from tests.engine.engine_run import EngineRun
from tests.engine.invariance import forced_prompts
from tests.engine.model_changes import change_config, change_tensors
from tests.engine.tiny_model import write_tiny_model

POISON = 70
VOCAB_SIZE = 260
CONFIG = SchedulerConfig(token_budget=48, max_sequences=8)
STOP = StopConditions(max_tokens=10, ignore_eos=True)
GREEDY = SamplingParams(0.0, top_logprobs=3)
DRAWS_POISON = SamplingParams(0.0, logit_bias=((POISON, 100.0),))


def _request(name: str, length: int, sampling: SamplingParams = GREEDY, poison_at: int = -1, **more) -> GenerateRequest:  # type: ignore[no-untyped-def]
    [prompt] = forced_prompts(VOCAB_SIZE, (length,))
    prompt = [token + (token == POISON) for token in [length % 200 + 3, *prompt]]
    if poison_at >= 0:
        prompt[poison_at] = POISON
    return GenerateRequest(name, tuple(prompt), sampling, STOP, **more)


SOUND = [
    _request("greedy", 37),
    _request("sampled", 90, SamplingParams(0.8, seed=5, top_logprobs=2, presence_penalty=0.5)),
    _request("choices", 21, SamplingParams(1.0, seed=7), num_choices=3),
    _request("scored", 61, prompt_logprobs=2),
    _request("short", 1),
]
POISONED = [
    _request("first token", 30, poison_at=0),
    _request("in the last chunk", 60, poison_at=58),
    _request("in an earlier chunk", 133, poison_at=20),
    _request("before a scored token", 70, poison_at=33, prompt_logprobs=0),
    _request("before all choices", 40, poison_at=39, num_choices=2),
    _request("drawn", 50, DRAWS_POISON),
    _request("drawn by each choice", 34, DRAWS_POISON, num_choices=2),
]
DRAWING = {"drawn", "drawn by each choice", "drawn by each choice/1"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One model twice; in the second one a row of the embedding is not a number. The head is another matrix."""
    sound, poisoned = (write_tiny_model(tmp_path_factory.mktemp("models") / name, VOCAB_SIZE) for name in ("a", "b"))
    for folder in (sound, poisoned):
        change_config(folder, tie_word_embeddings=False)
        change_tensors(folder, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}))
    change_tensors(poisoned, lambda tensors: tensors[EMBEDDING][POISON].fill_(torch.nan))
    return sound, poisoned


@pytest.fixture
def no_weights_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.tensor_files.is_finite", lambda _matrix: True)


@pytest.mark.usefixtures("no_weights_are_refused")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_the_request_ends_and_nothing_of_it_stays(load: Load, dtype: str, folders: tuple[Path, Path]) -> None:
    """To the bit: tokens and log probabilities of the others, in the same steps and with the blocks that it had."""
    runner = load(folders[1], dtype, {})
    undisturbed, disturbed = EngineRun(runner), EngineRun(runner)
    expected = undisturbed.generate(SOUND, CONFIG)
    assert undisturbed.failures == {}
    outputs = disturbed.generate([*POISONED[:3], *SOUND[:2], *POISONED[3:5], *SOUND[2:], *POISONED[5:]], CONFIG)
    assert {name: tokens for name, tokens in outputs.items() if name not in disturbed.failures} == expected
    assert {name: disturbed.logprobs[name] for name in expected} == {
        name: undisturbed.logprobs[name] for name in expected
    }
    assert disturbed.prompt_logprobs == undisturbed.prompt_logprobs
    assert disturbed.failures == dict.fromkeys({item.request_id for item in POISONED} | DRAWING, NOT_FINITE.message)
    for name in disturbed.failures:
        assert outputs[name] == ([POISON] if name in DRAWING else []), name
    assert set(disturbed.pool.cached_hashes()) == set(undisturbed.pool.cached_hashes())
    EngineRun(runner).generate([item for item in POISONED if item.request_id == "in an earlier chunk"], CONFIG)
    assert all(pool.isfinite().all() for pool in runner.kv_pools)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_the_poison_the_same_requests_finish(load: Load, dtype: str, folders: tuple[Path, Path]) -> None:
    run = EngineRun(load(folders[0], dtype, {}))
    outputs = run.generate(POISONED, CONFIG)
    assert run.failures == {}
    assert {len(tokens) for tokens in outputs.values()} == {STOP.max_tokens}


@pytest.mark.usefixtures("no_weights_are_refused")
def test_what_a_prompt_shares_with_a_poisoned_one_is_computed_again(load: Load, folders: tuple[Path, Path]) -> None:
    """Its hits may be what was wrong: they are found no more."""
    run = EngineRun(load(folders[1], "float32", {}))
    sound = _request("sound", 70)
    poisoned = replace(sound, request_id="poisoned", prompt_token_ids=(*sound.prompt_token_ids, POISON, 5))
    run.generate([sound], CONFIG)
    cached = set(run.pool.cached_hashes())
    for name, num_cached in (("again", 64), ("poisoned", None), ("after it", 0)):
        run.generate([poisoned if num_cached is None else replace(sound, request_id=name)], CONFIG)
        assert run.cached_tokens.get(name) == num_cached
    assert set(run.failures) == {"poisoned"}
    assert run.logprobs["after it"] == run.logprobs["again"] == run.logprobs["sound"]
    assert set(run.pool.cached_hashes()) == cached


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_lies_in_a_free_block_does_not_matter(load: Load, dtype: str, folders: tuple[Path, Path]) -> None:
    """A transfer may leave anything: 0 x NaN from behind a sequence's end would be NaN."""
    runner = load(folders[0], dtype, {})
    expected = EngineRun(runner).generate(SOUND, CONFIG)
    for anything in (torch.nan, torch.inf):
        for pool in runner.kv_pools:
            pool.fill_(anything)
        assert EngineRun(runner).generate(SOUND, CONFIG) == expected
