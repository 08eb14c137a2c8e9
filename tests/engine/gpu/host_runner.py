"""The GPU runner on a CPU: its graphs, buckets and layouts, over attention that one can check by reading."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from engine.adapter import load_adapters
from engine.dtypes import DTYPES
from engine.gpu.device import HostDevice
from engine.gpu.runner import GpuModelRunner
from engine.model_config import ModelConfig
from engine.models.arithmetic import CpuArithmetic
from engine.models.decoder import Gather, alone
from engine.parallel.shard import WHOLE, Shard
from engine.weights import load_weights
from tests.engine.gpu.reference_attention import reference_attention

NUM_BLOCKS = 256


class TiledArithmetic(CpuArithmetic):
    """torch's operations in large tiles, so that MKL too takes one kernel for any number of rows."""

    name = "tiled"
    row_multiple = 128


def load_host_gpu(
    folder: Path,
    dtype: str = "float32",
    adapters: Mapping[str, Path] | None = None,
    *,
    num_blocks: int = NUM_BLOCKS,
    max_graph_sequences: int = 4,
    device: HostDevice | None = None,
    shard: Shard = WHOLE,
    gather: Gather = alone,
) -> GpuModelRunner:
    config, torch_dtype = ModelConfig.load(folder), DTYPES[dtype]
    part = shard.config(config)
    return GpuModelRunner(
        part,
        load_weights(folder, config, torch_dtype, shard=shard),
        dtype,
        num_blocks,
        16,
        device or HostDevice(),
        lambda pool: reference_attention(pool, part.num_heads),
        TiledArithmetic(),
        max_graph_sequences=max_graph_sequences,
        gather=gather,
        adapters=load_adapters(adapters or {}, config, torch_dtype, shard),
    )
