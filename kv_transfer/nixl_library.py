"""The only door to NIXL: sets UCX's environment before the library is loaded, then loads it once.

`nixl_cu13._api` is imported by name, not the meta package `nixl`, which picks a CUDA major by what else is installed.
Figures and reasons: docs/adr/0003-nixl-push.md, measured with UCX 1.23 as bundled in nixl-cu13 1.5.1.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kv_transfer.pool import MemoryPool

Indices = NDArray[np.int32]

LOCAL_SIDE: Final = "NIXL_INIT_AGENT"
TRANSPORT_VERSION: Final = importlib.metadata.version("nixl-cu13")

# Set unless the user set them.
_ENVIRONMENT: Final = {
    # A black-holed or frozen receiver would otherwise hold a push forever. Longer than any stall of a live one.
    "UCX_TCP_USER_TIMEOUT": "20s",
    # Larger segments: reads over TCP are 0.6 times as fast with the defaults.
    "UCX_TCP_TX_SEG_SIZE": "256k",
    "UCX_TCP_RX_SEG_SIZE": "512k",
    # UCX would warn of the two below whenever UCX_TLS leaves shared memory out.
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    # NIXL logs to stdout, which belongs to our commands.
    "NIXL_LOG_LEVEL": "WARN",
}
# Lets notifications travel by shared memory beside failure detection: a push is settled in 9 us instead of the
# target's polling period. Untested with device memory.
_HOST_MEMORY_ENVIRONMENT: Final = {"UCX_POSIX_ERROR_HANDLING": "y", "UCX_SYSV_ERROR_HANDLING": "y"}

_ERROR_NAMES: Final = (
    "nixlBackendError",
    "nixlCancelledError",
    "nixlInvalidParamError",
    "nixlMismatchError",
    "nixlNotAllowedError",
    "nixlNotFoundError",
    "nixlNotPostedError",
    "nixlNotSupportedError",
    "nixlRemoteDisconnectError",
    "nixlRepostActiveError",
    "nixlUnknownError",
)


@dataclass(frozen=True, slots=True)
class NixlLibrary:
    """The loaded library. Its errors share no base class, so they are collected here."""

    api: ModuleType
    errors: tuple[type[Exception], ...]

    def open_agent(self, name: str) -> Any:
        """An agent without progress thread (it would spin a core) and with strict locking (the default crashes
        when a second thread exists). Must be used by one thread only. Takes about 0.4 s the first time.

        Raises: RuntimeError: no UCX plugin, or $HOME is unreadable (NIXL looks for its configuration there).
        """
        config = self.api.nixl_agent_config(
            enable_prog_thread=False, sync_mode=self.api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        )
        return self.api.nixl_agent(name, config)


@cache
def load_nixl(memory_kind: str, interface: str | None = None) -> NixlLibrary:
    """Load NIXL for "DRAM" or "VRAM" pools. UCX reads its environment once a process: the first call decides.

    interface: network interfaces that UCX may listen on and use, by name ("lo", "mlx5_0:1"); None: all.
    """
    environment = _ENVIRONMENT | (_HOST_MEMORY_ENVIRONMENT if memory_kind == "DRAM" else {})
    if interface is not None:
        environment = environment | {"UCX_NET_DEVICES": interface}
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    api = importlib.import_module("nixl_cu13._api")
    bindings = importlib.import_module("nixl_cu13._bindings")
    return NixlLibrary(api, tuple(getattr(bindings, name) for name in _ERROR_NAMES))


def register_region(agent: Any, region: MemoryPool) -> list[Any]:
    """Let peers write to a region. Host memory is not pinned for TCP and CMA; for RDMA and CUDA it is.

    A registration each run: UCX takes the GPU's context from the call (github.com/ai-dynamo/nixl/issues/222)."""
    runs = zip(region.base_addresses, region.device_ids, strict=True)
    return [
        agent.register_memory([(address, region.run_bytes, device_id, "")], region.memory_kind)
        for address, device_id in runs
    ]


def prepare_blocks(agent: Any, side: str, pool: MemoryPool) -> Any:
    """One descriptor a block and run, of our pool (LOCAL_SIDE) or of a peer's (its agent's name), as a strided row for
    each run: a thousand times cheaper than a row a block. `block_indices` says which is which."""
    rows = [
        [address, pool.part_bytes, device_id, pool.part_bytes, pool.num_blocks]
        for address, device_id in zip(pool.base_addresses, pool.device_ids, strict=True)
    ]
    return agent.prep_xfer_dlist(side, np.array(rows, dtype=np.uint64), pool.memory_kind)


def block_indices(blocks: Sequence[int], num_blocks: int, num_runs: int) -> Indices:
    """Of the descriptors of `blocks` in a pool of `num_blocks`: run after run."""
    run_starts = np.arange(num_runs, dtype=np.int32) * num_blocks
    return np.add.outer(run_starts, np.array(blocks, dtype=np.int32)).ravel()
