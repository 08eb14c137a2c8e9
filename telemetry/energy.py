"""What a GPU has used, where NVML tells. A CPU tells nothing: there is no figure then, rather than a wrong one."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final, Protocol

from telemetry.logs import log_state

logger = logging.getLogger(__name__)

JOULES_PER_MILLIJOULE: Final = 0.001


class Nvml(Protocol):
    """What is used of the module pynvml. Every call may raise NVMLError."""

    NVMLError: type[Exception]

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any: ...

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any) -> int:
        """Millijoules since the driver was loaded; Volta and newer."""
        ...


class GpuEnergy:
    """That of all GPUs of a worker, since this was made. Raises: NVMLError: one does not tell."""

    def __init__(self, nvml: Nvml, gpu_uuids: Sequence[str]) -> None:
        self._nvml = nvml
        nvml.nvmlInit()
        self._handles = [nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in gpu_uuids]
        self._first_mj = self._read_mj()

    def joules(self) -> float | None:
        """None: one does not tell any more, as after a driver was lost."""
        try:
            return (self._read_mj() - self._first_mj) * JOULES_PER_MILLIJOULE
        except self._nvml.NVMLError:
            return None

    def _read_mj(self) -> int:
        return sum(self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in self._handles)


def gpu_energy(gpu_uuids: Sequence[str]) -> GpuEnergy | None:
    """Of GPUs by their UUIDs, as NVML writes them: "GPU-..."; None where there are none."""
    if not gpu_uuids:
        return None
    # Imported here: only where there is a GPU.
    import pynvml

    return told_energy(pynvml, gpu_uuids)


def told_energy(nvml: Nvml, gpu_uuids: Sequence[str]) -> GpuEnergy | None:
    """None where NVML does not tell; the log says why."""
    try:
        return GpuEnergy(nvml, gpu_uuids)
    except nvml.NVMLError as error:
        log_state(logger, logging.WARNING, gpu=",".join(gpu_uuids), state="energy not told", reason=str(error))
        return None
