"""A GPU's energy over a stand-in for NVML: since the worker began, and nothing where nothing is told."""

from __future__ import annotations

import pytest

from telemetry.energy import gpu_energy, told_energy


class NvmlLost(Exception):
    pass


class StubNvml:
    NVMLError: type[Exception] = NvmlLost

    def __init__(self) -> None:
        self.energy_mj, self.lost = 7_000_000, False

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in ("GPU-known", "GPU-another"):
            raise NvmlLost("not found")
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        if self.lost:
            raise NvmlLost("lost")
        return self.energy_mj if handle == "GPU-known" else 3 * self.energy_mj


def test_joules_since_the_worker_began() -> None:
    nvml = StubNvml()
    energy = told_energy(nvml, ["GPU-known"])
    assert energy is not None and energy.joules() == 0
    nvml.energy_mj += 2500
    assert energy.joules() == pytest.approx(2.5)
    nvml.lost = True
    assert energy.joules() is None


def test_the_gpus_of_one_worker_are_summed() -> None:
    nvml = StubNvml()
    energy = told_energy(nvml, ["GPU-known", "GPU-another"])
    nvml.energy_mj += 2500
    assert energy is not None and energy.joules() == pytest.approx(10.0)


def test_what_nvml_does_not_tell_is_absent_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    nvml = StubNvml()
    assert told_energy(nvml, ["GPU-known", "GPU-other"]) is None
    nvml.lost = True
    assert told_energy(nvml, ["GPU-known"]) is None
    assert caplog.text.count('state="energy not told"') == 2


def test_a_cpu_has_none_and_the_real_binding_is_there() -> None:
    """On a machine without a driver the binding says so by its own error, which is caught."""
    assert gpu_energy([]) is None
    assert gpu_energy(["GPU-00000000-0000-0000-0000-000000000000"]) is None
