"""Each kernel against float64, and each sum the same to the bit for any number of rows beside it."""

from __future__ import annotations

import random

import pytest
import torch

from tests.engine.cpu.kernels import PAGE_TOKENS, Kernels

DTYPES = (torch.float32, torch.bfloat16)
ROW_COUNTS = (*range(1, 15), 24, 25, 36, 37, 48, 49, 96, 97)
ROUNDING = {torch.float32: 2e-7, torch.bfloat16: 2**-8}  # of one value stored in the dtype


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(64, 64), (192, 576), (1, 1), (65, 31), (200, 77)])
def test_products(kernels: Kernels, dtype: torch.dtype, num_outputs: int, num_inputs: int) -> None:
    left, matrix = _random(97, num_inputs).to(dtype), _random(num_outputs, num_inputs, seed=1).to(dtype)
    expected = left.double() @ matrix.double().T
    error = (left.abs().double() @ matrix.abs().double().T) * 1e-6
    whole = kernels.multiply(left, matrix)
    assert ((whole.double() - expected).abs() <= error).all()
    for num_rows in ROW_COUNTS:
        assert torch.equal(kernels.multiply(left[:num_rows], matrix), whole[:num_rows]), num_rows


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_added(kernels: Kernels, dtype: torch.dtype) -> None:
    left, matrix, onto = _random(7, 32).to(dtype), _random(65, 32, seed=1).to(dtype), _random(7, 65, seed=2)
    assert torch.equal(kernels.multiply(left, matrix, onto), kernels.multiply(left, matrix) + onto)


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu(kernels: Kernels, dtype: torch.dtype) -> None:
    left, gate_up = (_random(13, 96) * 3).to(dtype), _random(2 * 80, 96, seed=1).to(dtype)
    gate, up = (left.double() @ gate_up.double().T).chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(
        kernels.swiglu(left, gate_up).double(), expected, rtol=max(ROUNDING[dtype], 2e-5), atol=1e-4
    )


def test_swiglu_of_extreme_gates_is_finite(kernels: Kernels) -> None:
    left = torch.tensor([[-1e4] + [0.0] * 15, [1e4] + [0.0] * 15])
    gate_up = torch.zeros(32, 16)
    gate_up[:, 0] = 1.0
    output = kernels.swiglu(left, gate_up)
    assert output[0].abs().max() < 1e-20
    torch.testing.assert_close(output[1], torch.full((16,), 1e8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 96, 576])
def test_normalise(kernels: Kernels, dtype: torch.dtype, size: int) -> None:
    row, scale = _random(size) * 5, _random(size, seed=1)
    expected = row.double() / (row.double().square().mean() + 1e-5).sqrt() * scale.double()
    got = kernels.normalise(row, scale, 1e-5, dtype).double()
    torch.testing.assert_close(got, expected, rtol=ROUNDING[dtype] * 4, atol=1e-7)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
def test_rotate(kernels: Kernels, head_dim: int) -> None:
    head, angles = _random(head_dim), _random(head_dim // 2, seed=1) * 10
    turned = torch.complex(head[: head_dim // 2].double(), head[head_dim // 2 :].double()) * torch.polar(
        torch.ones(head_dim // 2, dtype=torch.float64), angles.double()
    )
    got = kernels.rotate(head, angles.cos(), angles.sin())
    torch.testing.assert_close(got.double(), torch.cat((turned.real, turned.imag)), rtol=1e-6, atol=1e-6)


def test_exponential_within_two_units_in_the_last_place(kernels: Kernels) -> None:
    values = torch.linspace(-87.0, 88.0, 1 << 16)
    expected = values.double().exp()
    assert ((kernels.exponential(values).double() - expected).abs() / expected).max() < 2 * 2.0**-23
    assert kernels.exponential(torch.full((16,), float("-inf"))).max() < 1e-37


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_visible", [1, 15, 16, 17, 47, 48])
def test_softmax_is_stable_and_sees_no_further(kernels: Kernels, dtype: torch.dtype, num_visible: int) -> None:
    scores = _random(48) * 1000 + 5000
    scores[num_visible:] = float("nan")  # whatever lies there must not matter
    weights, inverse_sum = kernels.soften(scores, num_visible, 0.125, dtype)
    assert torch.equal(weights[num_visible:], torch.zeros(48 - num_visible, dtype=dtype))
    expected = (scores[:num_visible].double() * 0.125).softmax(dim=0)
    torch.testing.assert_close(
        weights[:num_visible].double() * inverse_sum, expected, rtol=ROUNDING[dtype] * 2 + 1e-4, atol=1e-6
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 4, 5, 8])
def test_attention(kernels: Kernels, dtype: torch.dtype, head_dim: int, group: int) -> None:
    num_tokens, num_kv_heads, num_rows = 123, 5, 21  # heads in bunches: 5, 4 + 1, 3 + 2, 2 + 2 + 1, one by one
    keys, values = (_random(num_tokens, num_kv_heads, head_dim, seed=seed).to(dtype) for seed in (1, 2))
    queries = _random(num_rows, num_kv_heads * group, head_dim, seed=3).to(dtype)
    whole = kernels.attend(queries, keys, values, *_pool(num_tokens, num_kv_heads, head_dim, dtype, seed=0))
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(whole.double(), _reference(queries, keys, values), rtol=tolerance, atol=tolerance)
    for num_last in (1, 2, 7):  # elsewhere in the pool, and fewer rows together
        pool = _pool(num_tokens, num_kv_heads, head_dim, dtype, seed=num_last)
        assert torch.equal(kernels.attend(queries[-num_last:].contiguous(), keys, values, *pool), whole[-num_last:])


def test_a_row_does_not_see_later_tokens(kernels: Kernels) -> None:
    keys, values, queries = (_random(40, 1, 64, seed=seed) for seed in (1, 2, 3))
    whole = kernels.attend(queries, keys, values, *_pool(40, 1, 64, torch.float32, seed=0))
    for count in (1, 16, 17, 33):
        pool = _pool(count, 1, 64, torch.float32, seed=count)
        assert torch.equal(kernels.attend(queries[:count], keys[:count], values[:count], *pool), whole[:count])


def test_greedy_choice_takes_the_lowest_of_equals(kernels: Kernels) -> None:
    for size in (1, 15, 16, 17, 100):
        logits = _random(size)
        assert kernels.greedy_choice(logits) == int(logits.argmax())
        for first in {0, size // 2, size - 1}:
            logits = torch.full((size,), -3.0)
            logits[first:] = 2.5
            assert kernels.greedy_choice(logits) == first


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_greedy_choice_refuses_what_is_not_finite(kernels: Kernels, bad: float) -> None:
    logits = _random(50)
    logits[33] = bad
    assert kernels.greedy_choice(logits) == -1


def _pool(
    num_tokens: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, seed: int
) -> tuple[torch.Tensor, list[int]]:
    """A pool of two layers with stale, finite contents, and scattered blocks for the tokens."""
    num_blocks = 12
    pool = (_random(num_blocks, 2, 2, num_kv_heads, PAGE_TOKENS, head_dim, seed=seed) * 100).to(dtype)
    return pool, random.Random(seed).sample(range(num_blocks), -(-num_tokens // PAGE_TOKENS))


def _reference(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last tokens in float64, [rows, heads, head_dim]."""
    num_rows, num_heads, head_dim = queries.shape
    group = num_heads // keys.shape[1]
    keys, values = (item.double().repeat_interleave(group, dim=1) for item in (keys, values))
    scores = torch.einsum("rhd,thd->hrt", queries.double(), keys) * head_dim**-0.5
    positions = torch.arange(len(keys) - num_rows, len(keys)).unsqueeze(-1)
    scores = scores.masked_fill(torch.arange(len(keys)) > positions, float("-inf"))
    return torch.einsum("hrt,thd->rhd", scores.softmax(dim=-1), values)
