"""The thin seam to the hardware: streams, pinned memory, captured graphs. Everything above it also runs on a CPU."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Protocol, TypeVar

import torch

from engine.gpu.step_layout import INT32, INT64

Result = TypeVar("Result")

DTYPES: Final = {INT32: torch.int32, INT64: torch.int64}
WARM_UPS: Final = 2  # before a capture: kernels compile and libraries open in the first run


class Device(Protocol):
    """Where a runner's tensors are and its kernels run."""

    name: str  # part of the numeric class: kind of processor and what compiles for it
    torch_device: torch.device

    def stream(self) -> AbstractContextManager[object]:
        """The one queue of all work: whoever computes, in whatever thread, does so inside of it."""
        ...

    def stage(self, values: array[int]) -> torch.Tensor:
        """`values` in host memory from which a copy to the device need not wait, [len(values)]."""
        ...

    def capture(self, step: Callable[[], Result]) -> Callable[[], Result]:
        """Run `step` now; the result runs it again, on the memory it used, whatever that holds by then, and gives the
        same tensors with new contents."""
        ...

    def finish(self) -> None:
        """Wait until all queued work is done: what it wrote may then be read by anybody, transfers included."""
        ...


class HostDevice:
    """A CPU. Work is done when a call returns, and a captured step is simply called again."""

    name = "host"
    torch_device = torch.device("cpu")

    def stream(self) -> AbstractContextManager[object]:
        """See Device."""
        return nullcontext()

    def stage(self, values: array[int]) -> torch.Tensor:
        """See Device."""
        return as_tensor(values)

    def capture(self, step: Callable[[], Result]) -> Callable[[], Result]:
        """See Device."""
        step()
        return step

    def finish(self) -> None:
        """See Device."""


class CudaDevice:
    """One NVIDIA GPU. Has not been run by us yet (bench/gpu/run.py is to be its first check)."""

    def __init__(self, index: int = 0) -> None:
        """`index` is counted round among the GPUs that torch sees. Raises: RuntimeError: it sees none."""
        self.torch_device = torch.device("cuda", index % max(1, torch.cuda.device_count()))
        self.capability = torch.cuda.get_device_capability(self.torch_device)
        kind = torch.cuda.get_device_name(self.torch_device).lower().replace(" ", "-")
        major, minor = self.capability
        self.name = f"{kind}-sm{major}{minor}-cuda{torch.version.cuda}"
        self._stream = torch.cuda.Stream(self.torch_device)
        self._graph_memory: Any = None  # one pool for all graphs: only one of them runs at a time
        # Sums of bfloat16 products stay float32 until the end, and float32 products are float32.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.set_float32_matmul_precision("highest")

    def stream(self) -> AbstractContextManager[object]:
        """See Device."""
        return torch.cuda.stream(self._stream)

    def stage(self, values: array[int]) -> torch.Tensor:
        """See Device. torch keeps pinned memory for reuse, and until the copies out of it are done."""
        return as_tensor(values).pin_memory() if values else as_tensor(values)

    def capture(self, step: Callable[[], Result]) -> Callable[[], Result]:
        """See Device."""
        for _ in range(WARM_UPS):
            step()
        graph = torch.cuda.CUDAGraph()
        # Other threads may call CUDA meanwhile (NIXL does).
        with torch.cuda.graph(graph, pool=self._graph_memory, stream=self._stream, capture_error_mode="thread_local"):
            result = step()
        self._graph_memory = graph.pool()

        def replay() -> Result:
            graph.replay()
            return result

        return replay

    def finish(self) -> None:
        """See Device."""
        event = torch.cuda.Event()
        event.record(self._stream)
        event.synchronize()


def as_tensor(values: array[int]) -> torch.Tensor:
    """The same memory, [len(values)], int32 or int64."""
    dtype = DTYPES[values.typecode]
    return torch.frombuffer(values, dtype=dtype) if values else torch.empty(0, dtype=dtype)


def gpu_uuid(tensor: torch.Tensor) -> str | None:
    """The name that NVML has for the GPU whose memory holds `tensor`; None: it is the host's."""
    return f"GPU-{torch.cuda.get_device_properties(tensor.device).uuid}" if tensor.is_cuda else None
