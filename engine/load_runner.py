"""Chooses what computes: a GPU where there is one, else our own CPU kernels where they can be built, else torch."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from core.errors import BadRequest
from engine.cpu.build import KernelsUnavailable
from engine.cpu.runner import PAGE_TOKENS, CpuModelRunner
from engine.gpu.runner import GpuModelRunner
from engine.runner import ModelRunner
from engine.torch_runner import TorchModelRunner

ENGINE_VARIABLE: Final = "TANDEM_ENGINE"
ENGINES: Final = ("cpu", "gpu", "torch")

logger = logging.getLogger(__name__)


def load_runner(
    folder: Path,
    dtype: str,
    num_blocks: int,
    block_size: int,
    progress: Callable[[str], None] = lambda _line: None,
    gpu_index: int = 0,
    *,
    unpack: bool = False,
) -> ModelRunner:
    """A runner of the model in `folder`. The environment variable TANDEM_ENGINE, one of ENGINES, forces one kind.

    unpack: hold quantised weights as floats; only the CPU kernels hold them otherwise.

    Where the CPU kernels cannot be used, that is logged as a warning and torch takes over, unless "cpu" is forced.

    Raises: BadModel: the folder is damaged or of an unsupported kind. BadRequest: dtype, block_size or the variable.
        KernelsUnavailable: "cpu" is forced and cannot be used.
    """
    forced = os.environ.get(ENGINE_VARIABLE, "")
    if forced and forced not in ENGINES:
        raise BadRequest(ENGINE_VARIABLE, f"must be one of {', '.join(ENGINES)}, got {forced!r}")
    if forced == "gpu" and not torch.cuda.is_available():
        raise BadRequest(ENGINE_VARIABLE, "gpu, but torch sees none, or is a build for CPUs")
    if forced == "gpu" or (not forced and torch.cuda.is_available()):
        return GpuModelRunner.load(folder, dtype, num_blocks, block_size, progress, gpu_index)
    if forced == "torch":
        return TorchModelRunner.load(folder, dtype, num_blocks, block_size, progress)
    try:
        if not forced and block_size != PAGE_TOKENS:
            raise KernelsUnavailable(f"block_size is {block_size}, they need {PAGE_TOKENS}")
        return CpuModelRunner.load(folder, dtype, num_blocks, block_size, progress, unpack=unpack)
    except KernelsUnavailable as error:
        if forced:
            raise
        logger.warning("CPU kernels cannot be used: %s; torch computes instead, several times slower", error)
        return TorchModelRunner.load(folder, dtype, num_blocks, block_size, progress)
