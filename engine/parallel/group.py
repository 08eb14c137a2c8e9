"""The ranks of one worker as one collective: NCCL between GPUs, Gloo between CPUs, on this host alone.

NCCL's gathers are captured in a graph with the rest, so ranks must capture and replay the same graphs in the same
order: they do, because each lays out the same plan by the same code.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
from torch import distributed

from engine.parallel.shard import Shard


class Group:
    """This process's place among the ranks. One a process. Making it waits for all ranks.

    Args:
        meeting_file: path of an empty file that all ranks can open; nobody else may use it.
        timeout_s: bound of the meeting, and of each gather.
    Raises: RuntimeError: a rank did not come, or is gone.
    """

    def __init__(self, shard: Shard, meeting_file: str, device: torch.device, timeout_s: float) -> None:
        self._size = shard.size
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")  # ranks are processes of one host
        distributed.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=distributed.FileStore(meeting_file, shard.size),  # type: ignore[attr-defined]
            rank=shard.rank,
            world_size=shard.size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if device.type == "cuda" else None,  # opens NCCL now, not in the first gather
        )

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Every rank's columns side by side, the same on all: [num_rows, columns] to [num_rows, size * columns].

        Copies bytes, adds nothing up. Raises: RuntimeError: a rank is gone, or did not come within the bound.
        """
        num_rows, columns = part.shape
        parts = part.new_empty((self._size * num_rows, columns))
        distributed.all_gather_single(parts, part.contiguous())
        return parts.view(self._size, num_rows, columns).transpose(0, 1).reshape(num_rows, -1)

    def close(self) -> None:
        """Leave. Does not wait for the others, which may be gone: destroying the group, NCCL would."""
        distributed.distributed_c10d._abort_process_group()
