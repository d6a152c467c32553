"""What an energy sensor is, and the sensor of the CPU: RAPL through Linux's powercap files.

A sensor counts the joules between `begin` and `end`; windows, idle power and missing values are the business of
`dispark.measure.energy`. RAPL counts whole CPU packages, every process on them included. It knows nothing about DRAM
sticks (a domain of their own, left out), disks, fans, the power supply's losses or any accelerator.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

POWERCAP = Path("/sys/class/powercap")


class SensorError(RuntimeError):
    """A sensor is missing or stopped working; the text is the reason to report, in one line."""


class Sensor(Protocol):
    """Counts joules between `begin` and `end`. Every method may raise SensorError; `begin` again abandons a window."""

    source: str
    scope: str

    def begin(self) -> None: ...

    def end(self) -> float:
        """Joules since `begin`."""

    def warnings(self) -> list[str]:
        """What made the window that just ended doubtful."""


class Ticker:
    """Calls a bound method every `interval_s` seconds on a daemon thread, off the path that is being measured.

    The first exception ends the ticking and is raised by `stop`. The thread holds its owner weakly, so a window that a
    crash left open does not go on polling for the rest of the process.
    """

    def __init__(self, method: Callable[[], None], interval_s: float) -> None:
        self._halt = threading.Event()
        self._errors: list[Exception] = []
        arguments = (weakref.WeakMethod(method), interval_s, self._halt, self._errors)
        self._thread = threading.Thread(target=self._run, args=arguments, name="energy-sensor", daemon=True)
        self._thread.start()

    @staticmethod
    def _run(
        method: weakref.WeakMethod[Callable[[], None]],
        interval_s: float,
        halt: threading.Event,
        errors: list[Exception],
    ) -> None:
        while not halt.wait(interval_s):
            call = method()
            if call is None:
                return
            try:
                call()
            except Exception as error:
                errors.append(error)
                return
            del call

    def stop(self) -> None:
        """Ends the thread; no call is running afterwards.

        Raises:
            SensorError: the method had failed, or hangs inside the driver.
        """
        self._halt.set()
        self._thread.join(timeout=5.0)
        if self._thread.is_alive():
            raise SensorError("the polling thread hangs inside a sensor read")
        if self._errors:
            error = self._errors[0]
            raise error if isinstance(error, SensorError) else SensorError(f"{type(error).__name__}: {error}")


class _Package:
    """One top-level RAPL domain: a counter in microjoules that wraps."""

    def __init__(self, folder: Path) -> None:
        self.name = _read_text(folder / "name")
        self._counter = folder / "energy_uj"
        self.range_uj = self._range(folder / "max_energy_range_uj")
        self._last_uj = self._read()
        self.total_uj = 0

    @staticmethod
    def _range(path: Path) -> int | None:
        try:
            return int(_read_text(path)) or None
        except (SensorError, ValueError):
            return None

    def _read(self) -> int:
        text = _read_text(self._counter)
        try:
            return int(text)
        except ValueError as error:
            raise SensorError(f"{self._counter} holds {text[:40]!r}, not a count of microjoules") from error

    def begin(self) -> None:
        self._last_uj = self._read()
        self.total_uj = 0

    def advance(self) -> None:
        now_uj = self._read()
        step_uj = now_uj - self._last_uj
        if step_uj < 0:
            if self.range_uj is None or step_uj + self.range_uj < 0:
                raise SensorError(f"RAPL {self.name}: the counter went back and its range is unknown")
            step_uj += self.range_uj
        self._last_uj = now_uj
        self.total_uj += step_uj


class RaplSensor:
    """Sums the package domains of `root`; subdomains (core, uncore, dram) and `psys` would count joules twice.

    Args:
        root: the powercap folder.
        tick_s: the counters are also read this often inside a window, so that no wrap goes unseen; None chooses an
            interval in which even a 1 kW package can't wrap.

    Raises:
        SensorError: there is no package domain, or one of them can't be read (a partial sum is never reported).
    """

    source = "rapl"

    def __init__(self, root: Path = POWERCAP, tick_s: float | None = None) -> None:
        self._packages = [_Package(folder) for folder in _package_folders(root)]
        if not self._packages:
            raise SensorError(f"{root} has no intel-rapl package domain")
        self.scope = "cpu packages " + ", ".join(package.name for package in self._packages)
        # A range in microjoules over 1e9 is the seconds that 1 kW takes to fill it.
        ranges_s = [package.range_uj / 1e9 for package in self._packages if package.range_uj is not None]
        self._tick_s = tick_s if tick_s is not None else max(0.1, min([60.0, *(seconds / 2 for seconds in ranges_s)]))
        self._ticker: Ticker | None = None

    def begin(self) -> None:
        self._stop_ticker(is_abandoned=True)
        for package in self._packages:
            package.begin()
        self._ticker = Ticker(self._advance, self._tick_s)

    def end(self) -> float:
        self._stop_ticker(is_abandoned=False)
        self._advance()
        return sum(package.total_uj for package in self._packages) / 1e6

    def warnings(self) -> list[str]:
        return []

    def _advance(self) -> None:
        for package in self._packages:
            package.advance()

    def _stop_ticker(self, is_abandoned: bool) -> None:
        ticker, self._ticker = self._ticker, None
        if ticker is None:
            return
        try:
            ticker.stop()
        except SensorError:
            if not is_abandoned:
                raise


def _package_folders(root: Path) -> list[Path]:
    """Top-level domains whose name starts with "package"; `intel-rapl-mmio` mirrors them and is left out."""
    try:
        folders = [path for path in root.iterdir() if re.fullmatch(r"intel-rapl:\d+", path.name)]
    except OSError:
        return []
    folders.sort(key=lambda path: int(path.name.rpartition(":")[2]))
    return [folder for folder in folders if _read_text(folder / "name").startswith("package")]


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except PermissionError as error:
        raise SensorError(f"{path} is not readable by this user (many kernels allow root only)") from error
    except OSError as error:
        raise SensorError(f"{path}: {error.strerror or error}") from error
