"""Makes the attention kernel that is chosen for a GPU."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Final

import torch

from engine.attention.backend import AttentionBackend, DeviceBatch
from engine.attention.flash import flash2_attention, flash4_attention
from engine.attention.paged import PagedAttention
from engine.gpu.choose_attention import FLASH2, FLASH4, TRITON, AttentionNeeds, choose_attention
from engine.gpu.device import CudaDevice
from engine.model_config import ModelConfig

ATTENTION_VARIABLE: Final = "TANDEM_ATTENTION"

logger = logging.getLogger(__name__)

MakeAttention = Callable[[torch.Tensor], AttentionBackend[DeviceBatch]]  # gets the KV pool


def attention_for(device: CudaDevice, config: ModelConfig, dtype: str, block_size: int, exact: bool) -> MakeAttention:
    """The best kernel for this GPU, or the one that the variable TANDEM_ATTENTION names; logged, with the reasons.

    Raises: BadRequest: see choose_attention.
    """
    needs = AttentionNeeds(
        capability=device.capability,
        importable={
            FLASH4: _can_find("flash_attn.cute"),
            FLASH2: _can_find("flash_attn.flash_attn_interface"),
            TRITON: _can_find("triton"),
        },
        dtype=dtype,
        block_size=block_size,
        head_dim=config.head_dim,
    )
    choice = choose_attention(needs, os.environ.get(ATTENTION_VARIABLE, ""))
    reasons = "".join(f"; not {kernel}: {reason}" for kernel, reason in choice.passed_over.items())
    logger.info("attention by %s on %s%s", choice.kernel, device.name, reasons)

    def make(pool: torch.Tensor) -> PagedAttention:
        if choice.kernel == FLASH4:
            return flash4_attention(pool)
        if choice.kernel == FLASH2:
            return flash2_attention(pool, exact)
        from engine.attention.paged_triton import triton_attention  # Triton need not be there

        return triton_attention(pool, config.num_heads, exact)

    return make


def _can_find(module: str) -> bool:
    """Without importing it: that alone would take seconds and memory of the GPU."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its package is not there
        return False
