"""Outputs under grammars, with the default model: always of the grammar's language, and the same in every mode."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from core.request import GenerateRequest, Grammar, GrammarKind, SamplingParams, StopConditions
from engine.cpu.runner import CpuModelRunner
from engine.grammar import GrammarCompiler
from engine.scheduler_config import SchedulerConfig
from engine.tokenizer import Tokenizer
from tests.engine.engine_run import EngineRun

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "parks": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["city", "parks"],
    "additionalProperties": False,
}
JSON = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
DATE = Grammar(GrammarKind.REGEX, r"[12]\d{3}-[01]\d-[0-3]\d")
PROMPT = "Tell me about a city."


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.load(model_folder)


def requests(tokenizer: Tokenizer, *grammars: Grammar | None) -> Iterator[GenerateRequest]:
    """Greedy and sampled, each with every grammar; min_tokens beyond what a date can have."""
    prompt = tuple(tokenizer.encode(PROMPT))
    for index, grammar in enumerate(grammars):
        for seed, temperature in enumerate((0.0, 0.9, 1.5)):
            sampling = SamplingParams(temperature, seed=seed, top_p=0.95)
            stop = StopConditions(max_tokens=48, min_tokens=30 if grammar is DATE else 0)
            yield GenerateRequest(f"{index} {seed}", prompt, sampling, stop, grammar=grammar)


def is_of(grammar: Grammar, text: str) -> bool:
    if grammar is DATE:
        return bool(re.fullmatch(grammar.source, text))
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return set(value) == {"city", "parks"} and len(value["city"]) <= 8 and 0 <= value["parks"] <= 99


def test_outputs_fit_and_are_equal_in_all_modes(default_cpu_runner: CpuModelRunner, tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, default_cpu_runner.vocab_size)

    def outputs(budget: int, at_once: int, disturb: random.Random | None = None) -> dict[str, list[int]]:
        run = EngineRun(default_cpu_runner, compiler.matcher)
        config = SchedulerConfig(token_budget=budget, max_sequences=at_once)
        found = run.generate(requests(tokenizer, JSON, DATE), config, disturb)
        assert run.num_preemptions > 0 or disturb is None
        return found

    alone = outputs(256, 1)
    for request in requests(tokenizer, JSON, DATE):
        assert request.grammar is not None
        assert is_of(request.grammar, tokenizer.decode(alone[request.request_id])), request.request_id
    assert outputs(3, 8) == alone
    half = {name: output[: len(output) // 2] for name, output in alone.items()}
    cut = [replace(item, output_token_ids=tuple(half[item.request_id])) for item in requests(tokenizer, JSON, DATE)]
    continued = EngineRun(default_cpu_runner, compiler.matcher).generate(cut, SchedulerConfig())  # on another worker
    assert {name: half[name] + output for name, output in continued.items()} == alone
    assert outputs(64, 4, random.Random(7)) == alone


def test_without_a_grammar_the_model_says_no_json(default_cpu_runner: CpuModelRunner, tokenizer: Tokenizer) -> None:
    run = EngineRun(default_cpu_runner)
    for output in run.generate(requests(tokenizer, None), SchedulerConfig()).values():
        text = tokenizer.decode(output)
        assert not is_of(JSON, text) and not is_of(DATE, text)
