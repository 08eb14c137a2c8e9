"""What a GPU check runs on: the device, a model's weights in each dtype, and the runners made of them."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import torch

from engine.attention.paged_triton import triton_attention
from engine.dtypes import DTYPES
from engine.gpu.arithmetic import ExactArithmetic, GpuArithmetic
from engine.gpu.attention import MakeAttention, attention_for
from engine.gpu.device import CudaDevice, Device, HostDevice
from engine.gpu.runner import GpuModelRunner
from engine.model_config import ModelConfig
from engine.models.arithmetic import CpuArithmetic
from engine.models.decoder import DecoderModel
from engine.torch_runner import TorchModelRunner
from engine.weights import Layer, ModelWeights, Weights, load_weights

BLOCK_SIZE: Final = 16
DEFAULT_SIZES: Final = {  # of the default model, for runs without its file
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


@dataclass
class Machine:
    """One device and one model. `folder`: None for random weights of the default model's sizes."""

    device: Device
    folder: Path | None
    num_blocks: int
    max_graph_sequences: int
    config: ModelConfig = field(init=False)

    def __post_init__(self) -> None:
        self.config = ModelConfig.load(self.folder) if self.folder else ModelConfig.parse(DEFAULT_SIZES)
        self.weights: Callable[[str], ModelWeights] = cache(self._weights)
        self.runner: Callable[..., GpuModelRunner] = cache(self._runner)

    @property
    def is_gpu(self) -> bool:
        return isinstance(self.device, CudaDevice)

    def reference(self, num_blocks: int) -> TorchModelRunner:
        """The float32 runner of the CPU, which the golden tokens hold."""
        model = DecoderModel(self.config, self.weights("float32"), CpuArithmetic())
        return TorchModelRunner(model, "float32", num_blocks, BLOCK_SIZE)

    def make_attention(self, dtype: str, exact: bool) -> MakeAttention:
        """The engine's own choice on a GPU; on a CPU the Triton kernel, interpreted."""
        if isinstance(self.device, CudaDevice):
            return attention_for(self.device, self.config, dtype, BLOCK_SIZE, exact)
        return partial(triton_attention, num_heads=self.config.num_heads, exact=exact)

    def _runner(self, dtype: str, exact: bool = False, graphs: bool = True) -> GpuModelRunner:
        return GpuModelRunner(
            self.config,
            self.weights(dtype),
            dtype,
            self.num_blocks,
            BLOCK_SIZE,
            self.device,
            self.make_attention(dtype, exact),
            ExactArithmetic() if exact else GpuArithmetic(),
            max_graph_sequences=self.max_graph_sequences if graphs else 0,
        )

    def _weights(self, dtype: str) -> ModelWeights:
        if self.folder is None:
            return random_weights(self.config, DTYPES[dtype])
        return load_weights(self.folder, self.config, DTYPES[dtype])


def open_device(name: str) -> Device:
    """ "cuda" or "cpu"."""
    return CudaDevice() if name == "cuda" else HostDevice()


def describe(device: Device) -> dict[str, Any]:
    """Versions and the device's own words."""
    facts: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": device.name,
        "host_threads": torch.get_num_threads(),
    }
    try:
        import triton

        facts["triton"] = triton.__version__
    except ImportError:
        facts["triton"] = None
    if isinstance(device, CudaDevice):
        properties = torch.cuda.get_device_properties(device.torch_device)
        facts |= {
            "capability": list(device.capability),
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": properties.total_memory / 2**30,
        }
    return facts


def random_weights(config: ModelConfig, dtype: torch.dtype) -> ModelWeights:
    """The same values in every dtype, up to rounding; large enough that greedy output varies."""
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).mul_(1.5 / columns**0.5)

    hidden, inner = config.hidden_size, config.intermediate_size
    query_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    head = matrix(config.vocab_size, hidden)
    layers = [
        Layer(
            attention_norm=torch.ones(hidden),
            qkv=matrix(query_rows + 2 * kv_rows, hidden).to(dtype),
            output=matrix(hidden, query_rows).to(dtype),
            feed_forward_norm=torch.ones(hidden),
            gate_up=matrix(2 * inner, hidden).to(dtype),
            down=matrix(hidden, inner).to(dtype),
        )
        for _ in range(config.num_layers)
    ]
    return Weights(head.to(dtype), tuple(layers), torch.ones(hidden), head)
