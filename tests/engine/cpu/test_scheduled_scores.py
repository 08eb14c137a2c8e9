"""Log probabilities of prompts: the same to the bit in every mode, and those that transformers computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from core.request import GenerateRequest, PromptLogprobs, StopConditions
from engine.cpu.runner import CpuModelRunner
from engine.export import export_floats
from engine.scheduler_config import SchedulerConfig
from tests.engine.engine_run import EngineRun
from tests.engine.golden import golden_cases
from tests.engine.token_stream import GREEDY

PROMPTS = {case["name"]: tuple(case["prompt_ids"]) for case in golden_cases() if 20 < len(case["prompt_ids"]) < 200}
NUM_TOP = 3


def requests(num_choices: int = 1, num_top: int | None = NUM_TOP) -> Iterator[GenerateRequest]:
    for name, prompt in PROMPTS.items():
        stop = StopConditions(max_tokens=6)
        yield GenerateRequest(name, prompt, GREEDY, stop, num_choices=num_choices, prompt_logprobs=num_top)


@pytest.fixture(scope="module")
def alone(default_cpu_runner: CpuModelRunner) -> dict[str, PromptLogprobs]:
    """One prompt after another, 64 tokens at a time."""
    run = EngineRun(default_cpu_runner)
    run.generate(requests(), SchedulerConfig(max_sequences=1))
    return run.prompt_logprobs


def test_each_token_but_the_first_is_scored_once(alone: dict[str, PromptLogprobs]) -> None:
    assert len(PROMPTS) > 2 and set(alone) == set(PROMPTS)
    for name, scores in alone.items():
        count = len(PROMPTS[name]) - 1
        assert len(scores.logprobs) == len(scores.ranks) == count
        assert len(scores.top_ids) == len(scores.top_logprobs) == count * NUM_TOP
        for index, (token_id, logprob, rank) in enumerate(
            zip(PROMPTS[name][1:], scores.logprobs, scores.ranks, strict=True)
        ):
            top = scores.top(index)
            assert (rank <= NUM_TOP) == ((token_id, logprob) in top)
            assert top[0][1] >= top[1][1] >= top[2][1] and (rank == 1) == (top[0] == (token_id, logprob))


def test_equal_to_the_bit_in_another_cut(default_cpu_runner: CpuModelRunner, alone: dict[str, PromptLogprobs]) -> None:
    """All at once, 7 tokens a step, with two choices, and where every block of the prompts is cached already."""
    config = SchedulerConfig(token_budget=40, max_scored_tokens=7)
    run = EngineRun(default_cpu_runner)
    plain = run.generate(requests(num_top=None), config)
    assert not run.prompt_logprobs
    scored = run.generate(requests(num_choices=2), config)
    assert run.prompt_logprobs == alone
    assert {name: scored[name] for name in PROMPTS} == plain


def test_equal_to_what_transformers_says(model_folder: Path, tmp_path: Path, alone: dict[str, PromptLogprobs]) -> None:
    name, prompt = min(PROMPTS.items(), key=lambda item: len(item[1]))
    floats = export_floats(model_folder, tmp_path / "floats", "float32", lambda _line: None)
    model = transformers.AutoModelForCausalLM.from_pretrained(floats, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0].double().log_softmax(dim=-1)
    own = torch.tensor(alone[name].logprobs, dtype=torch.float64)
    rows = torch.arange(len(prompt) - 1)
    torch.testing.assert_close(own, expected[rows, torch.tensor(prompt[1:])], atol=2e-4, rtol=0)
    best = torch.tensor(alone[name].top_logprobs, dtype=torch.float64).view(-1, NUM_TOP)
    torch.testing.assert_close(best, expected[:-1].topk(NUM_TOP).values, atol=2e-4, rtol=0)
