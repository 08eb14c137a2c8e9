"""Which attention kernel a GPU gets: a closed list, in order of preference, and the reason why each was passed over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from core.errors import BadRequest

FLASH4: Final = "flash4"
FLASH2: Final = "flash2"
TRITON: Final = "triton"
KERNELS: Final = (FLASH4, FLASH2, TRITON)  # best first
FLASH2_BLOCK_TOKENS: Final = 256  # flash-attn 2 takes pages of whole multiples of it
FLASH4_ARCHITECTURES: Final = (9, 10, 11)  # on 8 and 12 it refuses paged KV
FLASH_MOST_HEAD_DIM: Final = {FLASH4: 128, FLASH2: 256}


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """What the choice depends on.

    capability: compute capability of the GPU, (major, minor).
    importable: by kernel, whether its library is there.
    dtype: "float32" or "bfloat16", of the KV pool.
    """

    capability: tuple[int, int]
    importable: Mapping[str, bool]
    dtype: str
    block_size: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """kernel: one of KERNELS. passed_over: why each better one is not it."""

    kernel: str
    passed_over: Mapping[str, str]


def choose_attention(needs: AttentionNeeds, forced: str = "") -> AttentionChoice:
    """The first of KERNELS that can be used, or the one that is asked for.

    Raises: BadRequest: on `TANDEM_ATTENTION`: it is no kernel, or cannot be used here; on `attention`: none can.
    """
    if forced and forced not in KERNELS:
        raise BadRequest("TANDEM_ATTENTION", f"must be one of {', '.join(KERNELS)}, got {forced!r}")
    if forced and (problem := _problem(forced, needs)):
        raise BadRequest("TANDEM_ATTENTION", f"{forced} cannot be used: {problem}")
    passed_over: dict[str, str] = {}
    for kernel in (forced,) if forced else KERNELS:
        problem = _problem(kernel, needs)
        if not problem:
            return AttentionChoice(kernel, passed_over)
        passed_over[kernel] = problem
    raise BadRequest("attention", "; ".join(f"{kernel}: {problem}" for kernel, problem in passed_over.items()))


def _problem(kernel: str, needs: AttentionNeeds) -> str:
    """Why it cannot be used; empty if it can."""
    major = needs.capability[0]
    if not needs.importable[kernel]:
        return "its library cannot be imported"
    if kernel == TRITON:
        return ""
    if needs.dtype != "bfloat16":
        return f"it takes bfloat16, not {needs.dtype}"
    if needs.head_dim % 8 or needs.head_dim > FLASH_MOST_HEAD_DIM[kernel]:
        return f"it takes head sizes of multiples of 8 up to {FLASH_MOST_HEAD_DIM[kernel]}, not {needs.head_dim}"
    if kernel == FLASH4 and major not in FLASH4_ARCHITECTURES:
        return f"it has no paged KV on compute capability {major}.{needs.capability[1]}"
    if kernel == FLASH2 and major < 8:
        return f"it needs compute capability 8.0, not {major}.{needs.capability[1]}"
    if kernel == FLASH2 and needs.block_size % FLASH2_BLOCK_TOKENS:
        return f"it needs blocks of {FLASH2_BLOCK_TOKENS} tokens, not {needs.block_size}"
    return ""
