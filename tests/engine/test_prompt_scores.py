"""Which rows of a prompt are scored: each once, whatever is cached, cut or preempted, and few in a step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.errors import InvariantBroken
from core.request import GenerateRequest, PromptLogprobs
from engine.step import Answer, Progress, PromptScore, ScoreSpec, SequenceSlice, StepPlan
from tests.engine.scheduler_bench import Bench, request
from tests.engine.token_memory import TokenMemory, next_token

PROMPT = tuple(range(30))


class ScoringMemory(TokenMemory):
    """A score is a hash of all tokens before it, read from the pool, and the token itself."""

    most_rows = 0

    def run(self, plan: StepPlan) -> list[tuple[Answer, ...]]:
        rows = sum(isinstance(spec, ScoreSpec) for spec in plan.samples)
        self.most_rows = max(self.most_rows, rows)
        return super().run(plan)  # type: ignore[return-value]

    def _draw(self, item: SequenceSlice) -> tuple[Answer, ...]:  # type: ignore[override]
        scores = [spec for spec in item.samples if isinstance(spec, ScoreSpec)]
        context = self.context(item)
        samples = tuple(spec for spec in item.samples if not isinstance(spec, ScoreSpec))
        drawn = super()._draw(replace(item, samples=samples))
        return (*(self._score(context[: item.start + spec.row + 1], spec) for spec in scores), *drawn)

    def _score(self, before: list[int], spec: ScoreSpec) -> PromptScore:
        if before[-1] + 1 != spec.token_id:
            raise InvariantBroken(f"token {spec.token_id} does not follow {before}")
        return PromptScore(-float(next_token(before)), len(before), ((spec.token_id, -1.0),) * spec.num_top)


class ScoringBench(Bench):
    def __init__(self, **how) -> None:
        super().__init__(**how)
        self.memory: ScoringMemory = ScoringMemory(self.pool, self.memory.block_size)
        self.scores: dict[str, PromptLogprobs] = {}

    def take(self, progress: list[Progress]) -> list[Progress]:
        for item in progress:
            for delta in item.deltas:
                if delta.prompt_logprobs is not None:
                    assert delta.position == delta.choice == 0 and item.request_id not in self.scores
                    self.scores[item.request_id] = delta.prompt_logprobs
        return super().take(progress)


def scored(item: GenerateRequest, num_top: int = 2) -> GenerateRequest:
    return replace(item, prompt_logprobs=num_top)


def expected(prompt: tuple[int, ...] = PROMPT, num_top: int = 2) -> PromptLogprobs:
    ends = range(1, len(prompt))
    return PromptLogprobs(
        num_top,
        tuple(-float(next_token(list(prompt[:end]))) for end in ends),
        tuple(ends),
        tuple(prompt[end] for end in ends for _ in range(num_top)),
        (-1.0,) * (len(ends) * num_top),
    )


@pytest.mark.parametrize("budget", [1, 7, 64])
def test_in_any_chunks(budget: int) -> None:
    bench = ScoringBench(token_budget=budget, max_scored_tokens=5)
    for name in "ab":
        bench.add(scored(request(name, PROMPT)))
    bench.add(request("plain", PROMPT))
    bench.run()
    assert bench.scores == {"a": expected(), "b": expected()}
    assert bench.memory.most_rows <= 5
    assert bench.outputs["a"] == bench.outputs["plain"]
    bench.assert_empty()


def test_what_is_cached_is_computed_again_where_it_is_to_be_scored() -> None:
    bench = ScoringBench()
    bench.add(request("first", PROMPT))
    bench.run()
    before = bench.memory.computed_tokens
    bench.add(scored(request("again", PROMPT, max_tokens=1), num_top=0))
    bench.run()
    assert bench.memory.computed_tokens - before == len(PROMPT)
    assert bench.scores == {"again": expected(num_top=0)}


def test_choices_share_one_scoring() -> None:
    bench = ScoringBench()
    bench.add(replace(scored(request("r", PROMPT)), num_choices=3))
    bench.run()
    assert bench.scores == {"r": expected()}


def test_a_prompt_of_one_token_has_nothing_to_score() -> None:
    bench = ScoringBench()
    bench.add(scored(request("r", (5,))))
    bench.run()
    assert bench.scores == {"r": PromptLogprobs(2, (), ())}


def test_a_preempted_prompt_is_scored_once() -> None:
    """A decode takes its blocks in the middle; what it has scored by then, and only that, may be a hit later."""
    bench = ScoringBench(num_blocks=14, token_budget=8, max_scored_tokens=4, growth_blocks=0)
    bench.add(request("old", range(100, 120), max_tokens=32))
    bench.step()
    bench.step()
    bench.add(scored(request("young", PROMPT, priority=0)))
    bench.run()
    assert bench.scheduler.num_preemptions > 0
    assert bench.scores == {"young": expected()}
    bench.assert_empty()


def test_a_prompt_computed_elsewhere_is_scored_there() -> None:
    """The prefill worker's first delta has the scores; decode's sequence may use hits and has none."""
    bench = ScoringBench()
    bench.add(scored(request("r", PROMPT)), prefill_only=True)
    while not (progress := bench.step()) or not progress[0].ended:
        pass
    bench.pool.release(progress[0].block_table)
    assert bench.scores == {"r": expected()}
    sequence = bench.scheduler.new_sequence(scored(request("landed", PROMPT)))
    assert not sequence.reusable_hashes()
    bench.scheduler.await_room(sequence)
    taken = bench.scheduler.reserve_next()
    assert taken is not None and len(taken.hits) == 7
    bench.scheduler.add_landed(sequence, [*taken.hits, *taken.fresh], [next_token(list(PROMPT))])
    assert sequence.tell_scores() is None
