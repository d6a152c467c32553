"""Energy meters: windows of seconds around the work, and what may be said about their joules.

A meter never ends a run. Where no sensor can be read, or one is lost inside a window, the reading carries None and the
reason; a missing value is never 0, and watts times seconds only ever fill `estimated_energy_j`. What a sensor covers is
its `scope`: whole boards or whole CPU packages, every tenant included, and never the energy at the wall.

Protocol of use:
1. `bind(device)` once, then per window `start()`, the work, `stop()`. On CUDA the caller synchronises before both, else
   queued work falls outside the window; trackers and other pollers stay outside it.
2. `combine(readings, meter.min_window_s)` once over all windows of an arm gives the reportable reading. A single window
   keeps its raw joules however short it is, since interleaved windows are made to be added; the rule on short windows
   is applied to the sum, and a lone window goes through `combine` too.
3. Idle power is taken inside the first `start` (or by `measure_idle`, earlier): `idle_s` seconds with the model loaded
   and nothing running, so gross minus idle is what the decoding added.

What it does not know: heat. A run after a hot one leaks more; cool-down between trials is the caller's business.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dispark.measure.nvml import NvmlCounter, NvmlPower, open_board
from dispark.measure.sensors import POWERCAP, RaplSensor, Sensor, SensorError
from dispark.measure.windows import DEFAULT_MIN_WINDOW_S, SHORT_WINDOW, combine
from dispark.types import EnergyReading, pick_device

__all__ = ["AutoMeter", "NullMeter", "NvmlCounterMeter", "NvmlPowerMeter", "RaplMeter", "SensorMeter", "combine"]

# Nothing that runs draws no energy: a sensor that has not moved for this long is not working.
STUCK_S = 1.0


class SensorMeter(ABC):
    """Windows over one sensor; subclasses say which sensor serves a device.

    Args:
        estimated_watts: if given, `estimated_energy_j` is this times the window; it never fills `energy_j`.
        idle_s: seconds of idle power measurement before the first window; 0 measures none.
        min_window_s: below this many summed seconds `combine` reports no joules.
        clock, sleep: replaced in tests.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        estimated_watts: float | None = None,
        idle_s: float = 0.0,
        min_window_s: float = DEFAULT_MIN_WINDOW_S,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.estimated_watts = _estimated_watts(estimated_watts)
        self.idle_s = _number("idle_s", idle_s, 0.0)
        self.min_window_s = _number("min_window_s", min_window_s, 0.0)
        self.idle_power_w: float | None = None
        self._clock, self._sleep = clock, sleep
        self._sensor: Sensor | None = None
        self._reason: str | None = None  # why there is no sensor
        self._failure: str | None = None  # why the open window has no reading
        self._idle_warning: str | None = None
        self._is_idle_done = False
        self._started: float | None = None

    @abstractmethod
    def open(self, device: torch.device) -> Sensor:
        """The sensor for this device; raises SensorError with the reason where there is none."""

    def bind(self, device: torch.device | str) -> None:
        """Says where the work runs; without it the first `start` takes CUDA where there is one, else the CPU."""
        chosen = torch.device(device)
        self._sensor = self._reason = self.idle_power_w = self._idle_warning = self._started = None
        self._is_idle_done = False
        try:
            self._sensor = self.open(chosen)
        except Exception as error:
            self._reason = _why(error)

    def measure_idle(self) -> None:
        """Sleeps `idle_s` seconds and keeps the mean power; does nothing without a sensor or with idle_s=0."""
        self._is_idle_done = True
        if self._sensor is None or self.idle_s == 0:
            return
        try:
            self._sensor.begin()
            started = self._clock()
            self._sleep(self.idle_s)
            seconds = self._clock() - started
            joules = self._sensor.end()
        except Exception as error:
            self._idle_warning = f"idle power is unknown: {_why(error)}"
            return
        if joules > 0 and seconds > 0:
            self.idle_power_w = joules / seconds
        else:
            self._idle_warning = "idle power is unknown: the sensor did not move"

    def start(self) -> None:
        """Opens a window; one that was left open is abandoned."""
        if self._sensor is None and self._reason is None:
            self.bind(pick_device("auto"))
        if not self._is_idle_done:
            self.measure_idle()
        self._failure = self._reason
        if self._sensor is not None:
            try:
                self._sensor.begin()
            except Exception as error:
                self._failure = _why(error)
        self._started = self._clock()

    def stop(self) -> EnergyReading:
        """Closes the window.

        Raises:
            RuntimeError: no window is open.
        """
        window_s = _close_window(self._started, self._clock)
        self._started = None
        energy_j, warnings = self._finish(window_s)
        return EnergyReading(
            energy_j=energy_j,
            window_s=window_s,
            source=self._sensor.source if self._sensor is not None else "none",
            scope=self._sensor.scope if self._sensor is not None else "none",
            idle_power_w=self.idle_power_w,
            reason=self._failure,
            warnings=tuple(warnings),
            estimated_energy_j=_estimate(self.estimated_watts, window_s),
        )

    def _finish(self, window_s: float) -> tuple[float | None, list[str]]:
        warnings = [self._idle_warning] if self._idle_warning else []
        if self._sensor is None or self._failure is not None:
            return None, warnings
        try:
            joules = self._sensor.end()
            warnings += self._sensor.warnings()
        except Exception as error:
            self._failure = _why(error)
            return None, warnings
        if joules <= 0 and window_s >= STUCK_S:
            self._failure = f"the sensor did not move in {window_s:.1f} s"
            return None, warnings
        return joules, warnings + ([SHORT_WINDOW] if window_s < self.min_window_s else [])


class NvmlCounterMeter(SensorMeter):
    """The energy counter of the NVIDIA board that the work runs on (Volta and newer): the best source there.

    Args:
        nvml: a module with pynvml's functions, for tests; None imports pynvml when a device is bound.
        The rest: see SensorMeter.
    """

    def __init__(
        self,
        estimated_watts: float | None = None,
        idle_s: float = 0.0,
        min_window_s: float = DEFAULT_MIN_WINDOW_S,
        nvml: Any = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(estimated_watts, idle_s, min_window_s, clock, sleep)
        self._nvml = nvml

    def open(self, device: torch.device) -> Sensor:
        return NvmlCounter(open_board(device, self._nvml))


class NvmlPowerMeter(SensorMeter):
    """Board power polled on a thread and integrated, for boards without a counter.

    Args:
        poll_interval_s: seconds between samples, 0.01 to 10.
        The rest: see NvmlCounterMeter.
    """

    def __init__(
        self,
        estimated_watts: float | None = None,
        idle_s: float = 0.0,
        min_window_s: float = DEFAULT_MIN_WINDOW_S,
        poll_interval_s: float = 0.1,
        nvml: Any = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(estimated_watts, idle_s, min_window_s, clock, sleep)
        self.poll_interval_s = _number("poll_interval_s", poll_interval_s, 0.01, 10.0)
        self._nvml = nvml

    def open(self, device: torch.device) -> Sensor:
        return NvmlPower(open_board(device, self._nvml), self.poll_interval_s, self._clock)


class RaplMeter(SensorMeter):
    """The CPU packages' counters; on a GPU run they cover the host's share only, and the reading says so.

    Args:
        powercap: folder of the counters, for tests.
        The rest: see SensorMeter.
    """

    def __init__(
        self,
        estimated_watts: float | None = None,
        idle_s: float = 0.0,
        min_window_s: float = DEFAULT_MIN_WINDOW_S,
        powercap: str | Path = POWERCAP,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(estimated_watts, idle_s, min_window_s, clock, sleep)
        self._powercap = Path(powercap)

    def open(self, device: torch.device) -> Sensor:
        sensor = RaplSensor(self._powercap)
        if device.type != "cpu":
            sensor.scope += f" (host only, not {device})"
        return sensor


class AutoMeter(SensorMeter):
    """The best sensor for the device: on CUDA the board's counter, else its polled power; on the CPU, RAPL.

    A GPU run never falls back to RAPL: the host's joules would pass for the board's. Without a sensor the reading is
    None and its reason names each source tried.

    Args: see NvmlPowerMeter and RaplMeter.
    """

    def __init__(
        self,
        estimated_watts: float | None = None,
        idle_s: float = 0.0,
        min_window_s: float = DEFAULT_MIN_WINDOW_S,
        poll_interval_s: float = 0.1,
        nvml: Any = None,
        powercap: str | Path = POWERCAP,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(estimated_watts, idle_s, min_window_s, clock, sleep)
        self.poll_interval_s = _number("poll_interval_s", poll_interval_s, 0.01, 10.0)
        self._nvml, self._powercap = nvml, Path(powercap)

    def open(self, device: torch.device) -> Sensor:
        candidates: dict[str, Callable[[], Sensor]] = {"rapl": lambda: RaplSensor(self._powercap)}
        if device.type == "cuda":
            candidates = {
                "nvml_counter": lambda: NvmlCounter(open_board(device, self._nvml)),
                "nvml_power": lambda: NvmlPower(open_board(device, self._nvml), self.poll_interval_s, self._clock),
            }
        tried = []
        for name, build in candidates.items():
            try:
                return build()
            except SensorError as error:
                tried.append(f"{name}: {error}")
        raise SensorError(f"no energy sensor for {device} ({'; '.join(tried)})")


class NullMeter:
    """Measures nothing but the window: for runs where energy is not wanted, with the reason on record.

    Args:
        reason: what the reading says in place of joules.
        estimated_watts: see SensorMeter.

    Raises:
        ValueError: the reason is empty or the watts are out of range.
    """

    min_window_s = DEFAULT_MIN_WINDOW_S

    def __init__(
        self,
        reason: str = "energy was not measured (meter=none)",
        estimated_watts: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not isinstance(reason, str) or not reason.strip():
            raise ValueError(f"meter.reason={reason!r}: must be a text that says why energy is not measured")
        self.reason = reason
        self.estimated_watts = _estimated_watts(estimated_watts)
        self._clock = clock
        self._started: float | None = None

    def bind(self, device: torch.device | str) -> None:
        """Nothing to find."""

    def start(self) -> None:
        self._started = self._clock()

    def stop(self) -> EnergyReading:
        window_s = _close_window(self._started, self._clock)
        self._started = None
        estimate = _estimate(self.estimated_watts, window_s)
        return EnergyReading(None, window_s, "none", "none", reason=self.reason, estimated_energy_j=estimate)


def _close_window(started: float | None, clock: Callable[[], float]) -> float:
    if started is None:
        raise RuntimeError("the meter was stopped without having been started")
    return clock() - started


def _estimate(watts: float | None, window_s: float) -> float | None:
    return None if watts is None else watts * window_s


def _estimated_watts(value: float | None) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"meter.estimated_watts={value!r}: must be a finite number > 0, or null for no estimate")
    return float(value)


def _number(key: str, value: float, low: float, high: float | None = None) -> float:
    limit = math.inf if high is None else high
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not low <= value <= limit:
        allowed = f">= {low:g}" if high is None else f"from {low:g} to {high:g}"
        raise ValueError(f"meter.{key}={value!r}: must be a finite number {allowed}")
    return float(value)


def _why(error: Exception) -> str:
    text = " ".join(str(error).split()) or "no message"
    return text if isinstance(error, SensorError) else f"{type(error).__name__}: {text}"
