"""Peak memory over one window: what torch allocated on the GPU, and what the process held in RAM.

GPU: the caching allocator's own peak (`max_memory_allocated`, and `max_memory_reserved` beside it). It knows nothing
about the CUDA context, library workspaces outside the allocator or other processes. RAM: the kernel's high-water mark
of the resident set, which Linux can reset for each window; where it can't, the number covers the process's whole life
and `host_scope` says so. Child processes and pages not yet touched are not in it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

HostScope = Literal["window", "process start"]
# VmHWM and VmRSS are read a moment apart from the reset, so a working reset still leaves a small difference.
RESET_SLACK_BYTES = 16 * 2**20


@dataclass(frozen=True)
class PeakMemory:
    """Peaks of one window in bytes; None with a reason where there is nothing to read.

    Args:
        peak_device_bytes: most bytes of live tensors on the GPU.
        peak_device_reserved_bytes: most bytes that torch held from the driver, live or cached.
        device_reason: why the two are None, else None.
        peak_host_bytes: highest resident set of this process.
        host_scope: "window", or "process start" where the mark could not be reset, so that earlier peaks are in it.
        host_reason: why peak_host_bytes is None, else None.
    """

    peak_device_bytes: int | None
    peak_device_reserved_bytes: int | None
    device_reason: str | None
    peak_host_bytes: int | None
    host_scope: HostScope
    host_reason: str | None


class MemoryMeter:
    """Peaks between `start` and `stop`; one window at a time, for resets are per process. Never raises in a run.

    Args:
        device: where the tensors live.
        proc: the process's folder in procfs, for tests.
        cuda: a module with torch.cuda's memory functions, for tests.
    """

    def __init__(self, device: torch.device | str, proc: str | Path = "/proc/self", cuda: Any = None) -> None:
        self._device = torch.device(device)
        self._proc = Path(proc)
        self._cuda = torch.cuda if cuda is None else cuda
        self._scope: HostScope = "process start"
        self._device_failure: str | None = None

    def start(self) -> None:
        """Resets both peaks. On CUDA call it synchronised."""
        self._device_failure = None
        if self._device.type == "cuda":
            try:
                self._cuda.reset_peak_memory_stats(self._device)
            except Exception as error:
                self._device_failure = _why(error)
        self._scope = "window" if self._reset_host() else "process start"

    def stop(self) -> PeakMemory:
        """Reads both peaks since `start`, or since the process began where `host_scope` says so."""
        allocated, reserved, device_reason = self._device_peaks()
        host, host_reason = self._host_peak()
        return PeakMemory(allocated, reserved, device_reason, host, self._scope, host_reason)

    def _device_peaks(self) -> tuple[int | None, int | None, str | None]:
        if self._device.type == "cpu":
            return None, None, "the device is the CPU: its tensors are in the host's peak"
        if self._device.type != "cuda":
            return None, None, f"torch keeps no peak for device type {self._device.type}"
        if self._device_failure is not None:
            return None, None, self._device_failure
        try:
            allocated = int(self._cuda.max_memory_allocated(self._device))
            return allocated, int(self._cuda.max_memory_reserved(self._device)), None
        except Exception as error:
            return None, None, _why(error)

    def _host_peak(self) -> tuple[int | None, str | None]:
        peak = self._status_bytes("VmHWM")
        if peak is not None:
            return peak, None
        try:
            import resource
        except ImportError:
            return None, "this platform tells no peak resident set"
        # Kilobytes on Linux and the BSDs, bytes on macOS.
        self._scope = "process start"
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, None

    def _reset_host(self) -> bool:
        """Resets the high-water mark (proc(5): clear_refs, 5) and checks that it fell: some sandboxes ignore it."""
        try:
            (self._proc / "clear_refs").write_text("5", encoding="ascii")
        except OSError:
            return False
        peak, resident = self._status_bytes("VmHWM"), self._status_bytes("VmRSS")
        return peak is not None and resident is not None and peak - resident <= RESET_SLACK_BYTES

    def _status_bytes(self, key: str) -> int | None:
        try:
            for line in (self._proc / "status").read_text(encoding="ascii", errors="replace").splitlines():
                if line.startswith(f"{key}:"):
                    return int(line.split()[1]) * 1024
        except (OSError, ValueError, IndexError):
            return None
        return None


def combine(peaks: Sequence[PeakMemory]) -> PeakMemory:
    """The highest of several windows' peaks; a part that is None makes that part of the result None.

    Raises:
        ValueError: there are no windows.
    """
    if not peaks:
        raise ValueError("peaks=[]: needs at least one window to take the highest of")
    is_windowed = all(peak.host_scope == "window" for peak in peaks)
    return PeakMemory(
        _highest([peak.peak_device_bytes for peak in peaks]),
        _highest([peak.peak_device_reserved_bytes for peak in peaks]),
        next((peak.device_reason for peak in peaks if peak.device_reason is not None), None),
        _highest([peak.peak_host_bytes for peak in peaks]),
        "window" if is_windowed else "process start",
        next((peak.host_reason for peak in peaks if peak.host_reason is not None), None),
    )


def _highest(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return max(known) if len(known) == len(values) else None


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split()) or 'no message'}"
