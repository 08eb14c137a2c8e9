from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from core.errors import InvariantBroken
from core.request import SamplingParams
from engine.sampler import SORTED_PREFIX, sample, uniform
from engine.step import SampleSpec

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
            seed=row * 977,
            banned=(row,) if row % 5 == 0 else (),
        )
        for row in range(24)
    ]
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
def test_broken_logits_stop_the_process(bad: float) -> None:
    sample(torch.tensor([[0.0, 1.0]]), [_spec()])
    with pytest.raises(InvariantBroken):
        sample(torch.tensor([[0.0, bad]]), [_spec()])


def test_banning_everything_is_a_bug() -> None:
    with pytest.raises(InvariantBroken):
        sample(torch.tensor([[0.0, 1.0]]), [_spec(banned=(0, 1))])
