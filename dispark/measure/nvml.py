"""One NVIDIA board through NVML: its energy counter, its power, and the state that explains a number.

NVML sees whole boards. It can't tell one process from another, knows nothing about a MIG slice (refused here), about
the CPU, the memory sticks or the power supply, and refreshes its sensors about every 100 ms, so a joule count is good
for windows of seconds. On A100 and H100 the power sensor looks at about a quarter of the time (Yang et al. 2024,
arXiv:2312.02741), so polled power can miss bursts; the energy counter is the better source. From Ampere on (GA100
excepted) the classic power reading is an average over the last second; the instantaneous field is taken where there is
one.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dispark.measure.sensors import SensorError, Ticker

POWER_INSTANT_FIELD = 186  # NVML_FI_DEV_POWER_INSTANT, milliwatts
UNSIGNED_INT = 1  # NVML_VALUE_TYPE_UNSIGNED_INT
CLOCK_SM, CLOCK_MEMORY, TEMPERATURE_GPU = 1, 2, 0
PCIE_TX, PCIE_RX = 0, 1
THROTTLE_BITS = {
    0x1: "gpu_idle",
    0x2: "applications_clocks",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake",
    0x100: "display_clock",
}
# Running at the power cap is how a board works under load; these are not.
SLOWDOWNS = ("hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake")
STATE_KEYS = (
    "name",
    "driver",
    "persistence_mode",
    "power_limit_w",
    "power_w",
    "sm_clock_mhz",
    "memory_clock_mhz",
    "temperature_c",
    "throttle_reasons",
    "num_other_processes",
)


class Board:
    """One board by its NVML handle. Every read turns whatever the driver raises into SensorError."""

    def __init__(self, nvml: Any, handle: Any, note: str | None = None) -> None:
        self._nvml = nvml
        self._handle = handle
        self.note = note
        index = _or_none(lambda: self._call("nvmlDeviceGetIndex"))
        self.scope = "gpu board" if index is None else f"gpu board {index}"

    def _call(self, function: str, *arguments: Any) -> Any:
        return call(self._nvml, function, self._handle, *arguments)

    def energy_j(self) -> float:
        """Joules since the driver was loaded."""
        return int(self._call("nvmlDeviceGetTotalEnergyConsumption")) / 1e3

    def instant_power_w(self) -> float:
        field = self._call("nvmlDeviceGetFieldValues", [POWER_INSTANT_FIELD])[0]
        if field.nvmlReturn != 0 or field.valueType != UNSIGNED_INT:
            raise SensorError("the board has no instantaneous power field")
        return int(field.value.uiVal) / 1e3

    def average_power_w(self) -> float:
        return int(self._call("nvmlDeviceGetPowerUsage")) / 1e3

    def utilisation(self) -> float:
        """Share of the last sampling period in which a kernel ran, 0 to 1."""
        return int(self._call("nvmlDeviceGetUtilizationRates").gpu) / 100

    def memory_share(self) -> float:
        """Memory in use over all of the board's, 0 to 1."""
        memory = self._call("nvmlDeviceGetMemoryInfo")
        return int(memory.used) / int(memory.total)

    def pcie_bytes_per_s(self) -> float:
        """Sent and received, over the driver's own window of some 20 ms, in which this call waits."""
        return 1e3 * sum(int(self._call("nvmlDeviceGetPcieThroughput", counter)) for counter in (PCIE_TX, PCIE_RX))

    def throttle_reasons(self) -> list[str]:
        try:
            bits = int(self._call("nvmlDeviceGetCurrentClocksEventReasons"))
        except SensorError:  # the name before driver 535
            bits = int(self._call("nvmlDeviceGetCurrentClocksThrottleReasons"))
        return [name for bit, name in THROTTLE_BITS.items() if bits & bit]

    def num_other_processes(self) -> int | None:
        """Other processes with a compute context on the board; None where the list does not even show this one.

        In a container the driver lists the host's process numbers, so this process is recognised by having a context.
        """
        pids = {int(process.pid) for process in self._call("nvmlDeviceGetComputeRunningProcesses")}
        if os.getpid() in pids:
            return len(pids) - 1
        if torch.cuda.is_initialized():
            return len(pids) - 1 if pids else None
        return len(pids)

    def state(self) -> dict[str, Any]:
        """STATE_KEYS, each None where the driver does not tell."""
        reads: dict[str, Callable[[], Any]] = {
            "name": lambda: _text(self._call("nvmlDeviceGetName")),
            "driver": lambda: _text(call(self._nvml, "nvmlSystemGetDriverVersion")),
            "persistence_mode": lambda: bool(self._call("nvmlDeviceGetPersistenceMode")),
            "power_limit_w": lambda: int(self._call("nvmlDeviceGetEnforcedPowerLimit")) / 1e3,
            "power_w": self.average_power_w,
            "sm_clock_mhz": lambda: int(self._call("nvmlDeviceGetClockInfo", CLOCK_SM)),
            "memory_clock_mhz": lambda: int(self._call("nvmlDeviceGetClockInfo", CLOCK_MEMORY)),
            "temperature_c": lambda: int(self._call("nvmlDeviceGetTemperature", TEMPERATURE_GPU)),
            "throttle_reasons": self.throttle_reasons,
            "num_other_processes": self.num_other_processes,
        }
        return {key: _or_none(reads[key]) for key in STATE_KEYS}

    def doubts(self) -> list[str]:
        """What the board says against a reading: a doubtful choice of board, other tenants, throttling."""
        found = [self.note] if self.note else []
        if others := _or_none(self.num_other_processes):
            found.append(f"{others} other process(es) on {self.scope}: the sensor covers the whole board")
        slow = [reason for reason in _or_none(self.throttle_reasons) or [] if reason in SLOWDOWNS]
        return found + ([f"{self.scope} was slowed down at the window's end: {', '.join(slow)}"] if slow else [])


class NvmlCounter:
    """The board's energy counter. Raises SensorError where the board has none (before Volta, and some boards since)."""

    source = "nvml_counter"

    def __init__(self, board: Board) -> None:
        self._board = board
        self.scope = board.scope
        self._begin_j = board.energy_j()

    def begin(self) -> None:
        self._begin_j = self._board.energy_j()

    def end(self) -> float:
        joules = self._board.energy_j() - self._begin_j
        if joules < 0:
            raise SensorError("the energy counter went back: the driver was reloaded inside the window")
        return joules

    def warnings(self) -> list[str]:
        return self._board.doubts()


class NvmlPower:
    """Power polled on a thread and integrated by the trapezoid rule, with one sample at each edge of the window.

    Args:
        board: the board to poll.
        poll_interval_s: seconds between samples; faster than the sensor's 100 ms gains nothing.
        clock: seconds, monotonic.
    """

    source = "nvml_power"

    def __init__(self, board: Board, poll_interval_s: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._board, self._interval_s, self._clock = board, poll_interval_s, clock
        self._is_average = False
        self._read = board.instant_power_w
        try:
            self._read()
        except SensorError:
            self._is_average = True
            self._read = board.average_power_w
            self._read()
        self.scope = f"{board.scope}, {'averaged' if self._is_average else 'instantaneous'} power"
        self._ticker: Ticker | None = None
        self._last: tuple[float, float] | None = None
        self._joules = self._longest_gap_s = 0.0

    def begin(self) -> None:
        if self._ticker is not None:
            self._halt(is_abandoned=True)
        self._last, self._joules, self._longest_gap_s = None, 0.0, 0.0
        self.sample()
        self._ticker = Ticker(self.sample, self._interval_s)

    def end(self) -> float:
        self._halt(is_abandoned=False)
        self.sample()
        return self._joules

    def sample(self) -> None:
        """Takes one sample; called by the ticker and at both edges, never at the same time."""
        power_w = self._read()
        now_s = self._clock()
        if self._last is not None:
            last_s, last_w = self._last
            self._joules += (now_s - last_s) * (power_w + last_w) / 2
            self._longest_gap_s = max(self._longest_gap_s, now_s - last_s)
        self._last = (now_s, power_w)

    def warnings(self) -> list[str]:
        found = self._board.doubts()
        if self._is_average:
            found.append("power is a running average (over 1 s on most boards since Ampere): window edges are smeared")
        if self._longest_gap_s > max(1.0, 5 * self._interval_s):
            found.append("power polling paused for over a second inside a window")
        return found

    def _halt(self, is_abandoned: bool) -> None:
        ticker, self._ticker = self._ticker, None
        try:
            if ticker is not None:
                ticker.stop()
        except SensorError:
            if not is_abandoned:
                raise


def open_board(
    device: torch.device | str,
    nvml: Any = None,
    environ: Mapping[str, str] = os.environ,
    uuid_of: Callable[[int], str | None] | None = None,
) -> Board:
    """Finds the board that a torch device means.

    torch counts CUDA devices after CUDA_VISIBLE_DEVICES and in CUDA's own order; NVML counts all boards in PCI order.
    The UUID that torch reports settles it; without one the variable is read, and a note says so where the orders may
    differ.

    Args:
        device: a cuda device; without an index, the current one.
        nvml: a module with pynvml's functions; None imports it.
        environ: where CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER are looked up.
        uuid_of: torch device index to "GPU-..." or None; None asks torch.

    Raises:
        SensorError: no driver, no such board, or a MIG slice.
    """
    chosen = torch.device(device)
    if chosen.type != "cuda":
        raise SensorError(f"the work runs on {chosen}, not on an NVIDIA board")
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError as error:
            raise SensorError("the package nvidia-ml-py is not installed") from error
    call(nvml, "nvmlInit")  # counted by NVML; left open for the life of the process
    index = chosen.index
    if index is None:
        index = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    entry = _visible_entry(environ.get("CUDA_VISIBLE_DEVICES"), index)
    uuid = (uuid_of or _torch_uuid)(index)
    note = None
    if uuid is not None:
        handle = call(nvml, "nvmlDeviceGetHandleByUUID", uuid)
    elif not entry.isdigit():
        handle = _handle_by_prefix(nvml, entry)
    else:
        handle = call(nvml, "nvmlDeviceGetHandleByIndex", int(entry))
        is_ambiguous = int(call(nvml, "nvmlDeviceGetCount")) > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"
        note = "the board was chosen by index although CUDA's order may differ from NVML's" if is_ambiguous else None
    mig = _or_none(lambda: call(nvml, "nvmlDeviceGetMigMode", handle))
    if mig is not None and int(mig[0]) == 1:
        raise SensorError("the board is in MIG mode: energy and power of a slice are not available")
    return Board(nvml, handle, note)


def device_state(device: torch.device | str, nvml: Any = None) -> dict[str, Any]:
    """Power limit, clocks, temperature, throttle reasons and company on the device's board, now.

    Returns:
        STATE_KEYS, each None where unreadable, and `reason`: why nothing is readable, else None. Never raises.
    """
    try:
        return {**open_board(device, nvml).state(), "reason": None}
    except Exception as error:
        return {**dict.fromkeys(STATE_KEYS), "reason": str(error) or type(error).__name__}


def call(nvml: Any, function: str, *arguments: Any) -> Any:
    """Calls an NVML function by name; an old binding without it counts as a sensor that is not there.

    Raises:
        SensorError: whatever was raised, in one line.
    """
    try:
        return getattr(nvml, function)(*arguments)
    except Exception as error:
        raise SensorError(f"{function}: {str(error) or type(error).__name__}") from error


def _visible_entry(visible: str | None, index: int) -> str:
    """What CUDA_VISIBLE_DEVICES says at a torch index; the index itself where the variable is unset."""
    if visible is None:
        return str(index)
    entries = [entry.strip() for entry in visible.split(",")]
    # CUDA drops the first invalid entry (for example -1) and everything behind it.
    usable: list[str] = []
    for entry in entries:
        if not (entry.isdigit() or entry.startswith(("GPU-", "MIG-"))):
            break
        usable.append(entry)
    if index >= len(usable):
        raise SensorError(f"CUDA_VISIBLE_DEVICES={visible!r} has no device {index}")
    if usable[index].startswith("MIG-"):
        raise SensorError("CUDA_VISIBLE_DEVICES names a MIG slice: its energy and power are not available")
    return usable[index]


def _torch_uuid(index: int) -> str | None:
    if not torch.cuda.is_available():
        return None
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    return None if uuid is None else f"GPU-{uuid}"


def _handle_by_prefix(nvml: Any, prefix: str) -> Any:
    """CUDA accepts a UUID's beginning where it is unique; NVML wants it whole, so all boards are compared."""
    handles = [call(nvml, "nvmlDeviceGetHandleByIndex", i) for i in range(int(call(nvml, "nvmlDeviceGetCount")))]
    matches = [handle for handle in handles if _text(call(nvml, "nvmlDeviceGetUUID", handle)).startswith(prefix)]
    if len(matches) != 1:
        raise SensorError(f"CUDA_VISIBLE_DEVICES entry {prefix!r} names {len(matches)} boards")
    return matches[0]


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _or_none(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception:
        return None
