from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import InvariantBroken
from core.request import FinishReason, SamplingParams
from engine.sampler import SORTED_PREFIX, draw, sample, uniform
from engine.step import NOT_FINITE, DeadEnd, SampleSpec, ScoredToken, ScoreSpec

CHI_SQUARE_999 = {2: 13.8, 7: 24.3}  # critical values at 0.999 by degrees of freedom; seeds are fixed, so no flakes
NUM_DRAWS = 8000
PINNED = (0.7012121095215254, 0.3779478083963547)


def _spec(temperature: float = 1.0, position: int = 0, banned: tuple[int, ...] = (), **filters: float) -> SampleSpec:
    return SampleSpec(SamplingParams(temperature=temperature, **filters), position, banned)  # type: ignore[arg-type]


def _draws(logits: list[float], num_draws: int = NUM_DRAWS, **spec: float) -> Counter[int]:
    rows = torch.tensor(logits).expand(num_draws, -1)
    return Counter(sample(rows, [_spec(position=position, **spec) for position in range(num_draws)]))  # type: ignore[arg-type]


def _chi_square(counts: Counter[int], probabilities: dict[int, float]) -> float:
    assert set(counts) <= set(probabilities)
    total = counts.total()
    return sum((counts[token] - total * share) ** 2 / (total * share) for token, share in probabilities.items())


def _softmax(logits: dict[int, float], temperature: float = 1.0) -> dict[int, float]:
    weights = {token: math.exp(value / temperature) for token, value in logits.items()}
    return {token: weight / sum(weights.values()) for token, weight in weights.items()}


LOGITS = [0.5, -1.0, 2.0, 1.0, 0.0, -0.5, 1.5, 0.2]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_distribution(temperature: float) -> None:
    counts = _draws(LOGITS, temperature=temperature)
    assert _chi_square(counts, _softmax(dict(enumerate(LOGITS)), temperature)) < CHI_SQUARE_999[7]


def test_top_k_keeps_the_best_renormalised() -> None:
    kept = {token: LOGITS[token] for token in (2, 6, 3)}
    assert _chi_square(_draws(LOGITS, top_k=3), _softmax(kept)) < CHI_SQUARE_999[2]


def test_top_p_keeps_the_token_that_crosses_it() -> None:
    logits = [math.log(share) for share in (0.1, 0.5, 0.3, 0.06, 0.04)]
    kept = {1: 0.5 / 0.9, 2: 0.3 / 0.9, 0: 0.1 / 0.9}
    assert _chi_square(_draws(logits, top_p=0.85), kept) < CHI_SQUARE_999[2]
    assert set(_draws(logits, 200, top_p=0.45)) == {1}


def test_top_p_counts_within_top_k() -> None:
    logits = [math.log(share) for share in (0.4, 0.3, 0.2, 0.1)]
    assert set(_draws(logits, 400, top_k=2, top_p=0.5)) == {0}  # 0.4 of 0.7 is over a half
    assert set(_draws(logits, 400, top_p=0.5)) == {0, 1}


@pytest.mark.parametrize(("top_k", "tokens"), [(1, {1}), (2, {1, 2}), (3, {1, 2, 3}), (9, {0, 1, 2, 3})])
def test_equal_logits_are_kept_from_the_lowest_id(top_k: int, tokens: set[int]) -> None:
    assert set(_draws([0.0, 1.0, 1.0, 1.0], 400, top_k=top_k)) == tokens


def test_top_p_over_a_flat_vocabulary_wider_than_the_sorted_prefix() -> None:
    vocab_size = 4 * SORTED_PREFIX
    counts = _draws([0.0] * vocab_size, 400, top_p=0.5)
    assert max(counts) < vocab_size // 2
    assert max(counts) > SORTED_PREFIX


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits = torch.zeros(1, 50000)
    logits[0, [17, 40, 49999]] = 3.0
    assert sample(logits, [_spec(temperature=0.0)]) == [17]


def test_tiny_temperature_is_greedy() -> None:
    assert set(_draws(LOGITS, 50, temperature=1e-300)) == {2}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banned_tokens_are_never_drawn(temperature: float) -> None:
    logits = torch.tensor([LOGITS, LOGITS])
    specs = [_spec(temperature, banned=(2, 6)), _spec(temperature=0.0)]
    for position in range(100):
        first, second = sample(logits, [SampleSpec(specs[0].sampling, position, (2, 6)), specs[1]])
        assert first not in (2, 6)
        assert second == 2
    assert logits[0].tolist() == torch.tensor(LOGITS).tolist()


def test_a_row_does_not_depend_on_the_others() -> None:
    rows = torch.randn(24, 5000, generator=torch.Generator().manual_seed(3)) * 3
    specs = [
        _spec(
            temperature=(0.0, 0.7, 1.0, 1.5)[row % 4],
            position=row,
            top_k=(0, 1, 50, 2000)[row // 4 % 4],
            top_p=(1.0, 0.9, 0.3)[row % 3],
            min_p=(0.0, 0.02)[row % 2],
            seed=row * 977,
            banned=(row,) if row % 5 == 0 else (),
            repetition_penalty=(1.0, 1.3)[row % 7 == 0],
            frequency_penalty=(0.0, 0.4)[row % 4 == 1],
            logit_bias=((row, 3.5),) if row % 6 == 0 else (),  # type: ignore[arg-type]
        )
        for row in range(24)
    ]
    specs = [replace(spec, prompt_token_ids=(1, 2), output_token_ids=(3, 3, row)) for row, spec in enumerate(specs)]
    alone = [sample(rows[row : row + 1], [specs[row]])[0] for row in range(24)]
    assert sample(rows, specs) == alone
    order = torch.randperm(24, generator=torch.Generator().manual_seed(4)).tolist()
    assert sample(rows[order], [specs[row] for row in order]) == [alone[row] for row in order]


def test_uniform_depends_on_seed_and_position_alone() -> None:
    assert uniform(1, 2) == uniform(1, 2)
    numbers = {uniform(seed, position) for seed in range(100) for position in range(100)}
    assert len(numbers) == 10_000
    assert all(0.0 < number < 1.0 for number in numbers)
    assert abs(sum(numbers) / len(numbers) - 0.5) < 0.01


def test_uniform_is_the_same_in_every_version() -> None:
    """A migrated request goes on with these very numbers, on a worker of a later version too."""
    assert uniform(0, 0) == PINNED[0]
    assert uniform(2**63 - 1, 4095) == PINNED[1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_end_their_row_alone(bad: float) -> None:
    """The others draw what they draw without it, under whatever options."""
    rows = torch.cat((WIDE, WIDE.roll(5), WIDE.roll(9)))
    options = (
        SamplingParams(1.5, seed=3, top_p=0.9),
        SamplingParams(0.7, seed=8, repetition_penalty=1.3, top_logprobs=2),
    )
    specs = [*(SampleSpec(item, 4, (1,), PROMPT, OUTPUT) for item in options), ScoreSpec(0, 7, 3)]
    alone = draw(rows, specs)
    broken = rows[0].clone()
    broken[11] = bad
    mixed = torch.stack((broken, rows[0], broken, rows[1], rows[2], broken))
    greedy = _spec()
    assert draw(mixed, [greedy, specs[0], specs[1], *specs[1:], ScoreSpec(0, 7, 3)]) == [
        NOT_FINITE, alone[0], NOT_FINITE, *alone[1:], NOT_FINITE,
    ]  # fmt: skip
    assert sample(mixed[:1], [greedy]) == [NOT_FINITE]
    assert NOT_FINITE.reason is FinishReason.ERROR


def test_banning_everything_is_a_bug() -> None:
    with pytest.raises(InvariantBroken):
        sample(torch.tensor([[0.0, 1.0]]), [_spec(banned=(0, 1))])


PROMPT, OUTPUT = (0, 3, 3, 9), (2, 7, 7, 7, 3)
WIDE = torch.randn(1, 64, generator=torch.Generator().manual_seed(5)) * 4


def _best_first(logits: torch.Tensor, **sampling: Any) -> list[int]:
    """All tokens in the order of their changed logits: greedy, each banned once it was drawn."""
    spec = SampleSpec(SamplingParams(0.0, **sampling), len(OUTPUT), (), PROMPT, OUTPUT)
    order: list[int] = []
    while len(order) < logits.shape[1]:
        order += sample(logits, [replace(spec, banned_token_ids=tuple(order))])
    return order


def _order(row: list[float]) -> list[int]:
    return sorted(range(len(row)), key=lambda token: -row[token])


@pytest.mark.parametrize("penalty", [0.5, 1.2, 3.0])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    processor = transformers.RepetitionPenaltyLogitsProcessor(penalty)
    expected = processor(torch.tensor([PROMPT + OUTPUT]), WIDE.clone())[0]
    assert expected.tolist() != WIDE[0].tolist()
    assert _best_first(WIDE, repetition_penalty=penalty) == _order(expected.tolist())


@pytest.mark.parametrize(("presence", "frequency"), [(1.5, 0.0), (0.0, 1.5), (-2.0, 0.7), (0.3, -1.1)])
def test_presence_and_frequency_count_the_output_alone(presence: float, frequency: float) -> None:
    expected = WIDE[0].tolist()
    for token, count in Counter(OUTPUT).items():
        expected[token] -= presence + count * frequency
    order = _best_first(WIDE, presence_penalty=presence, frequency_penalty=frequency)
    assert order == _order(expected)
    assert order != _order(WIDE[0].tolist())


def test_bias_comes_before_penalties_and_bans_come_last() -> None:
    logits = torch.tensor([[1.0, 0.0, -3.0, 2.0]])
    sampling = SamplingParams(0.0, repetition_penalty=2.0, presence_penalty=0.5, logit_bias=((2, 9.0), (3, -1.5)))
    spec = SampleSpec(sampling, 1, (), (0,), (2,))
    # 0: 1 / 2; 2: (-3 + 9) / 2 - 0.5; 3: 2 - 1.5, the equal of 0.
    assert sample(logits, [spec]) == [2]
    assert sample(logits, [replace(spec, banned_token_ids=(2,))]) == [0]
    assert sample(logits, [replace(spec, banned_token_ids=(2, 0))]) == [3]
    assert logits.tolist() == [[1.0, 0.0, -3.0, 2.0]]


def test_logit_bias_forces_and_forbids() -> None:
    assert set(_draws(LOGITS, 200, logit_bias=((1, 100.0),))) == {1}  # type: ignore[arg-type]
    counts = _draws(LOGITS, logit_bias=((2, -100.0), (6, -100.0), (0, 1.0)))  # type: ignore[arg-type]
    kept = {token: value + (token == 0) for token, value in enumerate(LOGITS) if token not in (2, 6)}
    assert set(counts) == set(kept)
    assert _chi_square(counts, _softmax(kept)) < CHI_SQUARE_999[7]


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("min_p", [0.05, 0.2, 1.0])
def test_min_p_is_that_of_transformers(min_p: float, temperature: float) -> None:
    scaled = torch.tensor([LOGITS]) / temperature
    kept = transformers.MinPLogitsWarper(min_p)(torch.tensor([[0]]), scaled)[0]
    expected = {token: value for token, value in enumerate(kept.tolist()) if math.isfinite(value)}
    counts = _draws(LOGITS, temperature=temperature, min_p=min_p)
    assert _chi_square(counts, _softmax(expected)) < CHI_SQUARE_999[7]


def test_top_p_counts_within_min_p() -> None:
    logits = [math.log(share) for share in (0.4, 0.25, 0.2, 0.15)]
    assert set(_draws(logits, 400, min_p=0.6, top_p=0.6)) == {0}  # 0.4 of 0.65 is over 0.6
    assert set(_draws(logits, 400, top_p=0.6)) == {0, 1}


@pytest.mark.parametrize("penalty", [5e-324, 1e-300, 1e300])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_extreme_penalty_breaks_nothing(penalty: float, temperature: float) -> None:
    logits = torch.tensor([[0.0, -2.0, 3.0, 1.0]])
    spec = SampleSpec(SamplingParams(temperature, repetition_penalty=penalty), 2, (), (0, 1, 2), (3,))
    assert sample(logits, [spec])[0] in range(4)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), penalty=st.floats(0.0, 1.7e308, exclude_min=True), min_p=st.floats(0.0, 1.0))
def test_no_legal_request_breaks_the_draw(data: st.DataObject, penalty: float, min_p: float) -> None:
    """A worker whose sampler raises ends: none may be brought down by what a caller may ask for."""
    token_ids, small = st.integers(0, 5), st.floats(-2.0, 2.0)
    biases = data.draw(st.dictionaries(token_ids, st.floats(-100.0, 100.0)))
    sampling = SamplingParams(
        temperature=data.draw(st.floats(0.0, 2.0)),
        top_p=data.draw(st.floats(0.0, 1.0, exclude_min=True)),
        top_k=data.draw(token_ids),
        min_p=min_p,
        repetition_penalty=penalty,
        presence_penalty=data.draw(small),
        frequency_penalty=data.draw(small),
        logit_bias=tuple(biases.items()),
        top_logprobs=3,
    )
    output = tuple(data.draw(st.lists(token_ids, max_size=4)))
    banned = tuple(data.draw(st.sets(token_ids, max_size=5)))
    logits = torch.tensor([data.draw(st.lists(st.floats(-200.0, 200.0, width=32), min_size=6, max_size=6))])
    [scored] = draw(logits, [SampleSpec(sampling, len(output), banned, (0, 3), output)])
    assert isinstance(scored, ScoredToken)
    assert scored.token_id in {*range(6)} - {*banned}
    assert math.isfinite(scored.logprobs.drawn) and len(scored.logprobs.top) == 3


def test_an_infinity_that_a_penalty_would_hide_is_still_seen() -> None:
    spec = SampleSpec(SamplingParams(0.0, repetition_penalty=2.0), 0, (), (0,))
    assert sample(torch.tensor([[float("inf"), 1.0]]), [spec]) == [NOT_FINITE]


def test_only_plain_greedy_is_plain() -> None:
    assert SampleSpec(SamplingParams(0.0), 3).is_plain_greedy
    assert not SampleSpec(SamplingParams(0.0), 3, (5,)).is_plain_greedy
    changes: list[dict[str, Any]] = [
        {"temperature": 0.1},
        {"repetition_penalty": 1.1},
        {"presence_penalty": -0.1},
        {"frequency_penalty": 0.1},
        {"logit_bias": ((1, 1.0),)},
        {"top_logprobs": 0},
    ]
    for change in changes:
        assert not SampleSpec(SamplingParams(**{"temperature": 0.0, **change}), 3).is_plain_greedy, change


def test_logprobs_are_the_models_own() -> None:
    """Whatever else the request asks for, and for those rows alone that ask."""
    logits = torch.tensor([LOGITS, LOGITS, LOGITS])
    expected = torch.tensor(LOGITS).double().log_softmax(dim=0).tolist()
    sampling = SamplingParams(0.5, top_k=1, presence_penalty=2.0, logit_bias=((1, 100.0),), top_logprobs=3)
    specs = [SampleSpec(sampling, 1, (2,), (), (6,)), _spec(temperature=0.0), _spec(temperature=0.0, top_logprobs=0)]
    scored, plain, alone = draw(logits, specs)
    assert isinstance(scored, ScoredToken) and isinstance(alone, ScoredToken)
    assert (scored.token_id, plain, alone.token_id) == (1, 2, 2)
    assert scored.logprobs.drawn == pytest.approx(expected[1], rel=1e-12)
    assert scored.logprobs.top == tuple((token, pytest.approx(expected[token], rel=1e-12)) for token in (2, 6, 3))
    assert (alone.logprobs.drawn, alone.logprobs.top) == (pytest.approx(expected[2], rel=1e-12), ())


def test_of_equal_logprobs_the_lower_id_comes_first() -> None:
    logits = torch.zeros(1, 50_000)
    logits[0, [17, 40, 49_999]] = 3.0
    [scored] = draw(logits, [_spec(temperature=0.0, top_logprobs=5)])
    assert isinstance(scored, ScoredToken)
    assert [token for token, _ in scored.logprobs.top] == [17, 40, 49_999, 0, 1]
    [narrow] = draw(logits[:, :2], [_spec(temperature=0.0, top_logprobs=20)])
    assert isinstance(narrow, ScoredToken) and len(narrow.logprobs.top) == 2


class FixedGrammar:
    """An engine.step.GrammarMatcher that allows the same tokens for ever."""

    def __init__(self, *allowed: int) -> None:
        self._mask = sum(1 << token_id for token_id in allowed).to_bytes(1, "little")

    def mask(self) -> bytes | DeadEnd:
        return self._mask

    def push(self, token_id: int) -> bool:
        raise AssertionError("drawing moves no grammar on")

    def fork(self) -> FixedGrammar:
        return self


class EndedGrammar(FixedGrammar):
    def mask(self) -> bytes | DeadEnd:
        return DeadEnd("over")


def _under(grammar: FixedGrammar, **spec: Any) -> SampleSpec:
    return replace(_spec(**{"temperature": 0.0, **spec}), grammar=grammar)


def test_a_grammar_leaves_what_it_allows() -> None:
    """Greedy and sampled; a bias cannot bring back what is not allowed, nor min_p and top_k what is masked."""
    rows = torch.tensor(LOGITS).expand(3, -1)
    biased = replace(_under(FixedGrammar(0, 5)), sampling=SamplingParams(temperature=0.0, logit_bias=((2, 100.0),)))
    assert sample(rows, [_under(FixedGrammar(1, 3)), _spec(0.0), biased]) == [3, 2, 0]
    specs = [_under(FixedGrammar(0, 3, 7), temperature=1.0, position=number) for number in range(NUM_DRAWS)]
    counts = Counter(sample(torch.tensor(LOGITS).expand(NUM_DRAWS, -1), specs))
    assert _chi_square(counts, _softmax({token: LOGITS[token] for token in (0, 3, 7)})) < CHI_SQUARE_999[2]  # type: ignore[arg-type]


def test_bans_give_way_where_a_grammar_leaves_nothing_else() -> None:
    """EOS is banned before min_tokens, but a grammar that allows nothing else has come to its end."""
    rows = torch.tensor(LOGITS).expand(3, -1)
    end, other = 4, 1
    specs = [_under(FixedGrammar(end, other), banned=(end,)), _under(FixedGrammar(end), banned=(end, 2))]
    assert sample(rows, [*specs, _spec(0.0, banned=(2,))]) == [other, end, 6]


def test_a_dead_end_is_its_row_s_alone() -> None:
    rows = torch.tensor(LOGITS).expand(4, -1)
    specs = [_spec(1.0, seed=3), _under(EndedGrammar(), temperature=1.0, seed=3), _under(FixedGrammar()), _spec(0.0)]
    alone, ended, empty, best = sample(rows, specs)
    assert (alone, best) == (sample(rows[:1], specs[:1])[0], 2)
    assert ended == DeadEnd("over")
    assert isinstance(empty, DeadEnd) and "no token" in empty.message


def test_logprobs_are_the_model_s_own_under_a_grammar() -> None:
    sampling = SamplingParams(temperature=0.0, top_logprobs=2)
    free, bound = draw(
        torch.tensor(LOGITS).expand(2, -1), [SampleSpec(sampling, 0), SampleSpec(sampling, 0, grammar=FixedGrammar(6))]
    )
    assert isinstance(free, ScoredToken) and isinstance(bound, ScoredToken)
    assert bound.token_id == 6
    assert bound.logprobs.top == free.logprobs.top
    assert bound.logprobs.drawn == free.logprobs.top[1][1]
