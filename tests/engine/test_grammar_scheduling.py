"""A grammar moves on with each token drawn, once, and its end is the output's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.errors import BadRequest
from core.request import FinishReason, GenerateRequest, Grammar, GrammarKind
from engine.step import DeadEnd, Drawn, SequenceSlice
from tests.engine.scheduler_bench import Bench, request
from tests.engine.token_memory import TokenMemory, undisturbed

PROMPT = tuple(range(10))


class CountingMatcher:
    """Allows everything until `num_tokens` are out; then it is complete, or at a dead end."""

    def __init__(self, source: str) -> None:
        self._kind, num_tokens = source.split()
        self._num_tokens = int(num_tokens)
        self.pushed: list[int] = []

    def mask(self) -> bytes | DeadEnd:
        dead = self._kind == "dead" and len(self.pushed) == self._num_tokens
        return DeadEnd("nothing can follow") if dead else b"\xff" * 125

    def push(self, token_id: int) -> bool:
        self.pushed.append(token_id)
        return self._kind == "complete" and len(self.pushed) == self._num_tokens

    def fork(self) -> CountingMatcher:
        other = CountingMatcher(f"{self._kind} {self._num_tokens}")
        other.pushed = list(self.pushed)
        return other


class ObedientMemory(TokenMemory):
    """A runner that asks grammars, as engine/sampler.py does."""

    def _draw(self, item: SequenceSlice) -> tuple[Drawn, ...]:
        masks = [spec.grammar.mask() if spec.grammar else b"" for spec in item.samples]
        drawn = zip(masks, super()._draw(item), strict=True)
        return tuple(mask if isinstance(mask, DeadEnd) else token for mask, token in drawn)


class GrammarBench(Bench):
    def __init__(self, **how) -> None:
        self.matchers: list[CountingMatcher] = []
        super().__init__(make_matcher=self._make, **how)
        self.memory = ObedientMemory(self.pool, self.memory.block_size)

    def _make(self, grammar: Grammar) -> CountingMatcher:
        self.matchers.append(CountingMatcher(grammar.source))
        return self.matchers[-1]


def under(source: str, item: GenerateRequest) -> GenerateRequest:
    return replace(item, grammar=Grammar(GrammarKind.REGEX, source))


def test_a_complete_grammar_ends_the_output() -> None:
    """Whatever min_tokens and ignore_eos say: nothing could follow."""
    bench = GrammarBench()
    bench.add(under("complete 3", request("r", PROMPT, max_tokens=8, min_tokens=5, ignore_eos=True)))
    bench.run()
    assert bench.outputs["r"] == undisturbed(PROMPT, 3)
    assert bench.finished["r"] is FinishReason.STOP
    bench.assert_empty()


def test_max_tokens_cut_a_grammar() -> None:
    bench = GrammarBench()
    bench.add(under("complete 9", request("r", PROMPT, max_tokens=8)))
    bench.run()
    assert bench.finished["r"] is FinishReason.LENGTH
    assert bench.matchers[0].pushed == bench.outputs["r"] == undisturbed(PROMPT, 8)


def test_a_dead_end_ends_its_request_alone() -> None:
    bench = GrammarBench()
    bench.add(under("dead 2", request("dead", PROMPT)))
    bench.add(request("free", PROMPT))
    bench.run()
    assert bench.outputs["dead"] == undisturbed(PROMPT, 2)
    assert bench.outputs["free"] == undisturbed(PROMPT, 8)
    assert bench.finished == {"dead": FinishReason.DEAD_END, "free": FinishReason.LENGTH}
    bench.assert_empty()


def test_who_is_preempted_takes_no_token_twice() -> None:
    bench = GrammarBench(num_blocks=10, growth_blocks=0)
    for name in "ab":
        bench.add(under("complete 20", request(name, PROMPT, max_tokens=24)))
    bench.run()
    assert bench.scheduler.num_preemptions > 0
    assert [matcher.pushed for matcher in bench.matchers] == [bench.outputs["a"], bench.outputs["b"]]
    assert bench.outputs["a"] == bench.outputs["b"] == undisturbed(PROMPT, 20)


def test_each_choice_has_a_matcher_of_its_own() -> None:
    """A dead end ends its choice; what the router then does with the others is not the engine's."""
    bench = GrammarBench()
    bench.add(replace(under("complete 5", request("r", PROMPT)), num_choices=3))
    bench.run()
    assert {name: len(output) for name, output in bench.outputs.items()} == {"r": 5, "r/1": 5, "r/2": 5}
    assert bench.outputs["r"] == undisturbed(PROMPT, 5)
    bench.assert_empty()


def test_an_engine_without_grammars_refuses_them_by_name() -> None:
    with pytest.raises(BadRequest, match="grammar"):
        Bench().add(under("complete 3", request("r", PROMPT)))
