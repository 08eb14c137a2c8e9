"""Which attention kernel a GPU gets, and that the reason is said."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.errors import BadRequest
from engine.gpu.choose_attention import FLASH2, FLASH4, TRITON, AttentionNeeds, choose_attention

ALL = {FLASH4: True, FLASH2: True, TRITON: True}
HOPPER = AttentionNeeds((9, 0), ALL, "bfloat16", block_size=16, head_dim=64)


def test_the_best_that_can_be_used_is_taken() -> None:
    assert choose_attention(HOPPER).kernel == FLASH4
    assert choose_attention(HOPPER).passed_over == {}


@pytest.mark.parametrize(
    ("needs", "kernel", "reasons"),
    [
        (replace(HOPPER, importable={**ALL, FLASH4: False}, block_size=256), FLASH2, ["cannot be imported"]),
        (replace(HOPPER, importable={**ALL, FLASH4: False}), TRITON, ["cannot be imported", "blocks of 256 tokens"]),
        (replace(HOPPER, dtype="float32"), TRITON, ["not float32", "not float32"]),
        (replace(HOPPER, head_dim=60), TRITON, ["multiples of 8", "multiples of 8"]),
        (replace(HOPPER, head_dim=192, block_size=512), FLASH2, ["up to 128"]),
        (replace(HOPPER, capability=(8, 6), block_size=256), FLASH2, ["no paged KV on compute capability 8.6"]),
        (replace(HOPPER, capability=(12, 0)), TRITON, ["compute capability 12.0", "blocks of 256"]),
        (replace(HOPPER, capability=(7, 5), block_size=256), TRITON, ["7.5", "needs compute capability 8.0"]),
    ],
)
def test_each_reason_passes_a_kernel_over(needs: AttentionNeeds, kernel: str, reasons: list[str]) -> None:
    choice = choose_attention(needs)
    assert choice.kernel == kernel
    assert len(choice.passed_over) == len(reasons)
    for said, expected in zip(choice.passed_over.values(), reasons, strict=True):
        assert expected in said


def test_a_forced_kernel_is_taken_or_refused_never_replaced() -> None:
    assert choose_attention(HOPPER, forced=TRITON).kernel == TRITON
    with pytest.raises(BadRequest, match="TANDEM_ATTENTION: flash2 cannot be used: it needs blocks of 256 tokens"):
        choose_attention(HOPPER, forced=FLASH2)
    with pytest.raises(BadRequest, match="TANDEM_ATTENTION: must be one of flash4, flash2, triton, got 'flash3'"):
        choose_attention(HOPPER, forced="flash3")


def test_without_any_kernel_the_error_names_each_reason() -> None:
    nothing = replace(HOPPER, importable=dict.fromkeys(ALL, False))
    with pytest.raises(BadRequest, match=r"attention: flash4: .*; flash2: .*; triton: "):
        choose_attention(nothing)
