"""Fakes that replay sensors: a clock that moves by hand, a pynvml look-alike and a powercap folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


class Clock:
    """Seconds that pass only when told to; `sleep` is how a meter waits."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class NvmlError(Exception):
    """Stands for pynvml.NVMLError."""


class Nvml:
    """pynvml with boards of constant power. `failures` maps a function's name to the error that it raises."""

    def __init__(self, clock: Clock, num_boards: int = 1, power_w: float = 200.0, **failures: str) -> None:
        self.clock, self.power_w, self.failures = clock, power_w, failures
        self.uuids = [f"GPU-{i}aaa-bbbb" for i in range(num_boards)]
        self.pids: list[int] = []
        self.throttle_bits = 0
        self.mig_mode: list[int] | None = None
        self.energy_mj: list[int] | None = None  # replayed one by one where given
        self.has_instant_power = True
        self.calls: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml"):
            self.calls.append(name)
            if name in self.failures:
                raise NvmlError(self.failures[name])
        return object.__getattribute__(self, name)

    def nvmlInit(self) -> None:  # noqa: N802
        return None

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.uuids)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        if index >= len(self.uuids):
            raise NvmlError("Invalid Argument")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        if uuid not in self.uuids:
            raise NvmlError("Not Found")
        return self.uuids.index(uuid)

    def nvmlDeviceGetUUID(self, handle: int) -> bytes:  # noqa: N802
        return self.uuids[handle].encode()

    def nvmlDeviceGetIndex(self, handle: int) -> int:  # noqa: N802
        return handle

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:  # noqa: N802
        if self.mig_mode is None:
            raise NvmlError("Not Supported")
        return self.mig_mode

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:  # noqa: N802
        if self.energy_mj is not None:
            return self.energy_mj.pop(0)
        return int(self.clock() * self.power_w * 1000)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:  # noqa: N802
        return int(self.power_w * 1000)

    def nvmlDeviceGetFieldValues(self, handle: int, fields: list[int]) -> list[Any]:  # noqa: N802
        assert fields == [186]
        value = SimpleNamespace(uiVal=int(self.power_w * 1000))
        return [SimpleNamespace(nvmlReturn=0 if self.has_instant_power else 3, valueType=1, value=value)]

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:  # noqa: N802
        return SimpleNamespace(gpu=75, memory=40)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
        return SimpleNamespace(total=80 * 2**30, used=20 * 2**30, free=60 * 2**30)

    def nvmlDeviceGetPcieThroughput(self, handle: int, counter: int) -> int:  # noqa: N802
        return {0: 1_000, 1: 2_500}[counter]

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:  # noqa: N802
        return [SimpleNamespace(pid=pid) for pid in self.pids]

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> int:  # noqa: N802
        return self.throttle_bits

    def nvmlDeviceGetName(self, handle: int) -> bytes:  # noqa: N802
        return b"Fake Board"

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "999.1"

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: int) -> int:  # noqa: N802
        return 700_000

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:  # noqa: N802
        return {1: 1980, 2: 3201}[kind]

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:  # noqa: N802
        return 41


class Powercap:
    """A powercap folder whose counters are written by hand."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(exist_ok=True)

    def domain(self, folder: str, name: str, energy_uj: int, range_uj: int | None = 1_000_000_000) -> None:
        path = self.root / folder
        path.mkdir(exist_ok=True)
        (path / "name").write_text(f"{name}\n")
        # Replaced in one step: a polling thread may be reading.
        (path / "next").write_text(f"{energy_uj}\n")
        (path / "next").replace(path / "energy_uj")
        if range_uj is not None:
            (path / "max_energy_range_uj").write_text(f"{range_uj}\n")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make_nvml(clock: Clock) -> Callable[..., Nvml]:
    def make(**options: Any) -> Nvml:
        return Nvml(clock, **options)

    return make


@pytest.fixture
def powercap(tmp_path: Path) -> Powercap:
    return Powercap(tmp_path / "powercap")
