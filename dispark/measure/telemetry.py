"""How busy the device is, sampled on a thread of its own so that decoding never waits for a reading.

On NVIDIA devices through NVML: utilisation, memory in use, PCIe traffic of the whole board, all processes included. On
CPUs: this process's share of the cores it may use, and of the machine's memory. What can't be read is None. A reading
is as old as the interval; it explains load and times nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dispark.measure.nvml import Board, open_board
from dispark.measure.sensors import SensorError, Ticker
from dispark.types import TelemetryReading

NOTHING = TelemetryReading()


class NullTelemetry:
    """Reads nothing."""

    def bind(self, device: torch.device | str) -> None:
        """There is nothing to start."""

    def latest(self) -> TelemetryReading:
        """All None."""
        return NOTHING


class AutoTelemetry:
    """NVML on NVIDIA devices, the process on CPUs; a sensor that fails reads None from then on.

    Args:
        interval_s: seconds between two samples.
        open_device: finds a board, for tests.
        proc: the process's folder in procfs, for tests.
    """

    def __init__(
        self,
        interval_s: float = 0.2,
        open_device: Callable[[torch.device | str], Board] = open_board,
        proc: str | Path = "/proc/self",
    ) -> None:
        if not 0.0 < interval_s < float("inf"):
            raise ValueError(f"telemetry.interval_s={interval_s}: must be a number of seconds above 0")
        self._interval_s, self._open, self._proc = interval_s, open_device, Path(proc)
        self._latest = NOTHING
        self._ticker: Ticker | None = None
        self._board: Board | None = None
        self._last: tuple[float, float] | None = None

    def bind(self, device: torch.device | str) -> None:
        """Starts sampling; a second call goes on with what runs."""
        if self._ticker is not None:
            return
        if torch.device(device).type == "cuda":
            try:
                self._board = self._open(device)
            except SensorError:
                return
        self.sample()
        self._ticker = Ticker(self.sample, self._interval_s)

    def latest(self) -> TelemetryReading:
        """The newest sample; all None before the first."""
        return self._latest

    def sample(self) -> None:
        """Takes one reading."""
        self._latest = self._of_process() if self._board is None else _of_board(self._board)

    def _of_process(self) -> TelemetryReading:
        now, busy = time.perf_counter(), time.process_time()
        last, self._last = self._last, (now, busy)
        share = None
        if last is not None and now > last[0]:
            share = min(1.0, (busy - last[1]) / (now - last[0]) / _num_cores())
        return TelemetryReading(utilisation=share, memory_share=_memory_share(self._proc))


def _of_board(board: Board) -> TelemetryReading:
    def read(method: Callable[[], float]) -> float | None:
        try:
            return method()
        except SensorError:
            return None

    return TelemetryReading(read(board.utilisation), read(board.memory_share), read(board.pcie_bytes_per_s))


def _num_cores() -> int:
    affinity: Any = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def _memory_share(proc: Path) -> float | None:
    """Resident set over the machine's memory; None where the system doesn't tell."""
    try:
        pages = int((proc / "statm").read_text(encoding="ascii").split()[1])
        return pages / os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError, IndexError):
        return None
