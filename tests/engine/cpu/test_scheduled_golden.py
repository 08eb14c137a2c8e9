"""The golden cases through the scheduler, in every mode that must not change an answer; and the same for sampled ones.

Three passes compute the prompts, each with a prefix cache of its own; the others find there what they need. The two
longest prompts take most of the time: one pass has both, and every other mode one of them, but for choices, which share
what is computed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle, islice, product
from typing import Any

import pytest
import torch

from core.blocks import CacheTier
from core.request import GenerateRequest, SamplingParams, StopConditions
from engine.cache_tiers import CacheTiers
from engine.cpu.runner import CpuModelRunner
from engine.host_slots import HostSlots
from engine.scheduler_config import SchedulerConfig
from tests.engine.engine_run import EngineRun
from tests.engine.golden import golden_cases
from tests.engine.token_stream import GREEDY

CASES = golden_cases()
WITHOUT_1024 = [case for case in CASES if case["name"] != "prose_1024"]
WITHOUT_1500 = [case for case in CASES if case["name"] != "prose_1500"]
UP_TO_400 = [case for case in CASES if len(case["prompt_ids"]) <= 400]
BLOCK_SIZE = 16
SAMPLED = [
    SamplingParams(temperature=0.8, seed=7),
    SamplingParams(temperature=1.2, top_p=0.9, top_k=50, seed=8),
    SamplingParams(temperature=1.0, min_p=0.02, repetition_penalty=1.1, presence_penalty=0.5, seed=9),
]


@pytest.fixture(scope="module")
def warm_run(default_cpu_runner: CpuModelRunner) -> EngineRun:
    """Its prefix cache holds WITHOUT_1500 after the first test that computes them."""
    return EngineRun(default_cpu_runner)


def golden_requests(
    cases: Sequence[dict[str, Any]] = CASES, count: int | None = None, num_choices: int = 1
) -> Iterator[GenerateRequest]:
    """The cases in turn, greedy, `count` requests in all; each once by default."""
    for number, case in enumerate(islice(cycle(cases), len(cases) if count is None else count)):
        stop = StopConditions(max_tokens=len(case["output_ids"]))
        yield GenerateRequest(
            f"{number} {case['name']}", tuple(case["prompt_ids"]), GREEDY, stop, num_choices=num_choices
        )


def reusable(tokens: Sequence[int]) -> int:
    """How many of the tokens stand in full blocks."""
    return len(tokens) // BLOCK_SIZE * BLOCK_SIZE


def assert_golden(outputs: dict[str, list[int]], count: int) -> None:
    assert len(outputs) == count
    expected = {case["name"]: case["output_ids"] for case in CASES}
    cases = {name: name.partition(" ")[2].partition("/")[0] for name in outputs}
    wrong = [name for name, output in outputs.items() if output != expected[cases[name]]]
    assert not wrong


def test_chunks_of_512_one_at_a_time(default_cpu_runner: CpuModelRunner) -> None:
    run = EngineRun(default_cpu_runner)
    outputs = run.generate(golden_requests(), SchedulerConfig(token_budget=512, max_sequences=1))
    assert_golden(outputs, len(CASES))


def test_chunks_of_64_eight_at_once_after_half_of_each_prompt_is_cached(default_cpu_runner: CpuModelRunner) -> None:
    run = EngineRun(default_cpu_runner)
    config = SchedulerConfig(token_budget=64, max_sequences=8)
    cases = WITHOUT_1024
    halves = [tuple(case["prompt_ids"][: len(case["prompt_ids"]) // 2 + 1]) for case in cases]
    once = StopConditions(max_tokens=1)
    run.generate([GenerateRequest(f"half {index}", half, GREEDY, once) for index, half in enumerate(halves)], config)
    assert_golden(run.generate(golden_requests(cases), config), len(cases))
    for request, half in zip(golden_requests(cases), halves, strict=True):
        assert run.cached_tokens[request.request_id] >= min(reusable(half), reusable(request.prompt_token_ids[:-1]))


def test_what_was_evicted_comes_back_from_host_memory_to_the_bit(default_cpu_runner: CpuModelRunner) -> None:
    num_slots, config, pool = 32, SchedulerConfig(token_budget=512), default_cpu_runner.kv_pool
    run = EngineRun(default_cpu_runner, tiers=CacheTiers(HostSlots((pool,), num_slots), num_slots))
    (case,) = [case for case in CASES if case["name"] == "prose_256"]
    request = GenerateRequest("r", tuple(case["prompt_ids"]), GREEDY, StopConditions(max_tokens=8))
    assert run.generate([request], config)["r"] == case["output_ids"][:8]
    before = {name: pool[block].clone() for name, block in run.pool._cached.items()}
    run.pool.release(run.pool.allocate(run.pool.num_free) or [])
    assert not run.pool.cached_hashes()
    pool.fill_(1.0)
    assert run.generate([request], config)["r"] == case["output_ids"][:8]
    assert run.pool.hit_blocks[CacheTier.HOST] == 15
    after = {name: pool[block] for name, block in run.pool._cached.items()}
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_chunks_of_16_with_32_at_once(warm_run: EngineRun) -> None:
    config = SchedulerConfig(token_budget=16 + 32, max_sequences=32)
    assert_golden(warm_run.generate(golden_requests(WITHOUT_1500, 32), config), 32)


def test_full_hits_then_preemption_at_random_steps(warm_run: EngineRun) -> None:
    config = SchedulerConfig(token_budget=64, max_sequences=8)
    cases = WITHOUT_1500
    assert_golden(warm_run.generate(golden_requests(cases), config), len(cases))
    for request in golden_requests(cases):
        assert warm_run.cached_tokens[request.request_id] == reusable(request.prompt_token_ids[:-1])
    assert_golden(warm_run.generate(golden_requests(cases), config, disturb=random.Random(1)), len(cases))
    assert warm_run.num_preemptions > 0


def test_four_choices_with_preemption_at_random_steps(warm_run: EngineRun) -> None:
    before = warm_run.num_preemptions
    config = SchedulerConfig(token_budget=64, max_sequences=32)
    requests = golden_requests(UP_TO_400, num_choices=4)
    assert_golden(warm_run.generate(requests, config, disturb=random.Random(2)), 4 * len(UP_TO_400))
    assert warm_run.num_preemptions > before


def test_seeded_draws_are_equal_in_all_modes(default_cpu_runner: CpuModelRunner) -> None:
    prompts = [case["prompt_ids"] for case in CASES if len(case["prompt_ids"]) < 300]

    def requests() -> Iterator[GenerateRequest]:
        for number, (prompt, sampling) in enumerate(zip(prompts, cycle(SAMPLED), strict=False)):
            stop = StopConditions(max_tokens=16, ignore_eos=True)
            yield GenerateRequest(f"r{number}", tuple(prompt), sampling, stop)

    def outputs(budget: int, at_once: int, disturb: random.Random | None = None) -> dict[str, list[int]]:
        run = EngineRun(default_cpu_runner)
        return run.generate(requests(), SchedulerConfig(token_budget=budget, max_sequences=at_once), disturb)

    def choices() -> Iterator[GenerateRequest]:
        for request in islice(requests(), 5):
            yield replace(request, num_choices=3)

    def singles() -> Iterator[GenerateRequest]:
        for request, choice in product(islice(requests(), 5), range(3)):
            name = f"{request.request_id}/{choice}" if choice else request.request_id
            yield replace(request, request_id=name, sampling=request.sampling.for_choice(choice))

    together, apart = (
        EngineRun(default_cpu_runner).generate(wanted, SchedulerConfig(token_budget=64, max_sequences=16))
        for wanted in (choices(), singles())
    )
    assert together == apart
    alone = outputs(512, 1)
    assert len({tuple(output) for output in alone.values()}) == len(prompts)
    modes: Sequence[tuple[int, int, random.Random | None]] = [(16, 8, None), (64, 32, None), (64, 8, random.Random(3))]
    for mode in modes:
        assert outputs(*mode) == alone, mode


def test_a_stream_that_goes_on_elsewhere_says_what_it_would_have_said(default_cpu_runner: CpuModelRunner) -> None:
    """Seeds are by position, and penalties tell the output from the prompt: cut anywhere, without any KV."""
    prompts = [case["prompt_ids"] for case in CASES if len(case["prompt_ids"]) < 100]
    config = SchedulerConfig(token_budget=256, max_sequences=32)
    whole = {
        f"{number}": GenerateRequest(f"{number}", tuple(prompt), sampling, StopConditions(24, min_tokens=20))
        for number, (prompt, sampling) in enumerate(zip(prompts, cycle(SAMPLED), strict=False))
    }
    outputs = EngineRun(default_cpu_runner).generate(whole.values(), config)
    order = random.Random(4)
    cut = {name: tuple(output[: order.randrange(1, len(output))]) for name, output in outputs.items()}
    rest = EngineRun(default_cpu_runner).generate(
        [replace(request, output_token_ids=cut[name]) for name, request in whole.items()], config
    )
    assert {name: [*cut[name], *rest[name]] for name in whole} == outputs
