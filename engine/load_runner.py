"""Chooses what computes: a GPU where there is one, else our own CPU kernels where they can be built, else torch.

Where ranks share a model, GPUs compute, one for each, or torch where that is forced.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import torch

from core.errors import BadRequest, RankLost
from engine.cpu.build import KernelsUnavailable
from engine.cpu.runner import PAGE_TOKENS, CpuModelRunner
from engine.dtypes import require_dtype
from engine.gpu import runner as gpu
from engine.gpu.runner import GpuModelRunner
from engine.model_config import ModelConfig
from engine.models.decoder import Gather
from engine.parallel.runner import LeadingRunner, ParallelRunner
from engine.parallel.shard import Shard, require_split
from engine.runner import ModelRunner
from engine.torch_runner import TorchModelRunner, make_pool

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
    tensor_parallel_size: int = 1,
    on_rank_lost: Callable[[RankLost], None] = lambda _lost: None,
    adapters: Mapping[str, Path] | None = None,
) -> ModelRunner:
    """A runner of the model in `folder`. The environment variable TANDEM_ENGINE, one of ENGINES, forces one kind.

    unpack: hold quantised weights as floats; only the CPU kernels hold them otherwise.
    gpu_index: the first of `tensor_parallel_size` GPUs in a row.
    on_rank_lost: see ParallelRunner.
    adapters: folders of LoRA adapters in PEFT's form, by their digests (SequenceSlice.adapter_digest).

    Where the CPU kernels cannot be used, that is logged as a warning and torch takes over, unless "cpu" is forced.

    Raises: BadModel: the folder is damaged or of an unsupported kind. BadRequest: dtype, block_size, the variable, or
            tensor_parallel_size, which does not divide the model, or is more than there are GPUs.
        KernelsUnavailable: "cpu" is forced and cannot be used.
    """
    forced = os.environ.get(ENGINE_VARIABLE, "")
    if forced and forced not in ENGINES:
        raise BadRequest(ENGINE_VARIABLE, f"must be one of {', '.join(ENGINES)}, got {forced!r}")
    if forced == "gpu" and not torch.cuda.is_available():
        raise BadRequest(ENGINE_VARIABLE, "gpu, but torch sees none, or is a build for CPUs")
    on_gpus = forced == "gpu" or (not forced and torch.cuda.is_available())
    if tensor_parallel_size > 1:
        if not on_gpus and forced != "torch":
            raise BadRequest("tensor_parallel_size", f"{tensor_parallel_size} wants GPUs, or {ENGINE_VARIABLE}=torch")
        gpus = range(gpu_index, gpu_index + tensor_parallel_size)
        start = _start_on_gpus if on_gpus else _start_on_host
        return start(folder, dtype, num_blocks, block_size, gpus, on_rank_lost, adapters or {})
    if on_gpus:
        return GpuModelRunner.load(folder, dtype, num_blocks, block_size, progress, gpu_index, adapters=adapters)
    if forced == "torch":
        return TorchModelRunner.load(folder, dtype, num_blocks, block_size, progress, adapters=adapters)
    try:
        if not forced and block_size != PAGE_TOKENS:
            raise KernelsUnavailable(f"block_size is {block_size}, they need {PAGE_TOKENS}")
        return CpuModelRunner.load(folder, dtype, num_blocks, block_size, progress, unpack=unpack, adapters=adapters)
    except KernelsUnavailable as error:
        if forced:
            raise
        logger.warning("CPU kernels cannot be used: %s; torch computes instead, several times slower", error)
        return TorchModelRunner.load(folder, dtype, num_blocks, block_size, progress, adapters=adapters)


def _start_on_gpus(
    folder: Path,
    dtype: str,
    num_blocks: int,
    block_size: int,
    gpus: range,
    on_lost: Callable[[RankLost], None],
    adapters: Mapping[str, Path],
) -> ParallelRunner:
    """Unrun by us (docs/adr/0028-tensor-parallelism.md)."""
    config = _part_of(folder, dtype, len(gpus))
    count = torch.cuda.device_count()
    if count < len(gpus):
        raise BadRequest("tensor_parallel_size", f"{len(gpus)} wants as many GPUs, torch sees {count}")
    places = [torch.device("cuda", index % count) for index in gpus]
    pools = [gpu.make_pool(config, dtype, num_blocks, block_size, place) for place in places]
    return ParallelRunner(partial(_load_shard, folder, dtype, num_blocks, block_size, adapters), pools, on_lost)


def _start_on_host(
    folder: Path,
    dtype: str,
    num_blocks: int,
    block_size: int,
    ranks: range,
    on_lost: Callable[[RankLost], None],
    adapters: Mapping[str, Path],
) -> ParallelRunner:
    """Pools in shared memory."""
    config = _part_of(folder, dtype, len(ranks))
    pools = [make_pool(config, dtype, num_blocks, block_size).share_memory_() for _ in ranks]
    return ParallelRunner(partial(_load_shard, folder, dtype, num_blocks, block_size, adapters), pools, on_lost)


def _part_of(folder: Path, dtype: str, size: int) -> ModelConfig:
    require_dtype(dtype)
    config = ModelConfig.load(folder)
    require_split(config, size)
    return Shard(0, size).config(config)


def _load_shard(
    folder: Path,
    dtype: str,
    num_blocks: int,
    block_size: int,
    adapters: Mapping[str, Path],
    shard: Shard,
    pool: torch.Tensor,
    gather: Gather,
) -> LeadingRunner:
    """A rank's part of the model, where its pool lies."""
    load: Callable[..., LeadingRunner] = TorchModelRunner.load
    if pool.is_cuda:
        load = partial(GpuModelRunner.load, gpu_index=pool.get_device())
    return load(folder, dtype, num_blocks, block_size, shard=shard, pool=pool, gather=gather, adapters=adapters)
