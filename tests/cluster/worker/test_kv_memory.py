"""What the transport is told of the KV pool's memory. The tensor on a GPU is a fake: none is here."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from cluster.worker.kv_memory import memory_of
from kv_transfer.pool import MemoryPool


@dataclass(frozen=True)
class FakeTensor:
    is_cuda: bool
    device: int
    nbytes: int = 4096

    def data_ptr(self) -> int:
        return 0x7000

    def get_device(self) -> int:
        return self.device


@pytest.mark.parametrize(
    ("tensor", "kind", "device_id"), [(FakeTensor(False, -1), "DRAM", 0), (FakeTensor(True, 3), "VRAM", 3)]
)
def test_kind_and_device_are_the_tensors(tensor: FakeTensor, kind: str, device_id: int) -> None:
    assert memory_of([tensor], num_blocks=8) == MemoryPool((0x7000,), 8, 512, kind, (device_id,))


def test_a_block_of_several_ranks_is_their_parts_together() -> None:
    assert memory_of([FakeTensor(True, 3), FakeTensor(True, 4)], num_blocks=8) == MemoryPool(
        (0x7000, 0x7000), 8, 1024, "VRAM", (3, 4)
    )
