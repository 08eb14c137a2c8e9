"""What a transport needs to know of the memory that KV blocks lie in."""

from __future__ import annotations

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


def memory_of(tensor: TensorMemory, num_blocks: int) -> MemoryPool:
    """A contiguous tensor of equal blocks, on the host or on a GPU."""
    return MemoryPool(
        base_address=tensor.data_ptr(),
        num_blocks=num_blocks,
        block_bytes=tensor.nbytes // num_blocks,
        memory_kind="VRAM" if tensor.is_cuda else "DRAM",
        device_id=tensor.get_device() if tensor.is_cuda else 0,
    )
