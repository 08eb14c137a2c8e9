"""What a transport needs to know of the memory that KV blocks lie in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kv_transfer.pool import MemoryPool


class TensorMemory(Protocol):
    """What we ask of a tensor; they stay in the engine."""

    @property
    def is_cuda(self) -> bool: ...

    @property
    def nbytes(self) -> int: ...

    def data_ptr(self) -> int: ...

    def get_device(self) -> int: ...


def memory_of(tensors: Sequence[TensorMemory], num_blocks: int) -> MemoryPool:
    """Contiguous tensors of equally many bytes, one for each rank, all on the host or all on GPUs."""
    return MemoryPool(
        base_addresses=tuple(tensor.data_ptr() for tensor in tensors),
        num_blocks=num_blocks,
        block_bytes=sum(tensor.nbytes for tensor in tensors) // num_blocks,
        memory_kind="VRAM" if tensors[0].is_cuda else "DRAM",
        device_ids=tuple(tensor.get_device() if tensor.is_cuda else 0 for tensor in tensors),
    )
