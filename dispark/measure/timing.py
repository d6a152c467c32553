"""One clock for the phases of a step.

On CUDA a phase is the time between two events on the stream, read after the step's one synchronisation, so that
measuring adds no sync; elsewhere it is host time. What the phases don't cover is host time. The clock does not know
what the phases are.
"""

from __future__ import annotations

import time
from typing import Any

import torch

PHASES = ("draft", "schedule", "verify", "accept", "commit")


class PhaseClock:
    """Times one step at a time: `start`, any number of `mark`s, `stop`.

    Args:
        device: where the phases' work runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._start_s = 0.0
        self._marks: list[tuple[str, Any]] = []

    def start(self) -> None:
        """Begins a step; the device has nothing queued from the one before."""
        self._marks = [("", self._now())]
        self._start_s = time.perf_counter()

    def mark(self, phase: str) -> None:
        """Ends the named phase; the next one begins. A phase may come twice: its times add up."""
        self._marks.append((phase, self._now()))

    def stop(self) -> dict[str, float]:
        """Ends the step. The device must be synchronised.

        Returns:
            seconds: `<phase>_s` for each of PHASES, `wall_s`, and `host_s` = wall_s minus the phases.
        """
        if self._is_cuda:
            torch.cuda.synchronize(self._device)
        wall_s = time.perf_counter() - self._start_s
        seconds = dict.fromkeys((f"{phase}_s" for phase in PHASES), 0.0)
        for (_, before), (phase, after) in zip(self._marks, self._marks[1:], strict=False):
            if phase in PHASES:
                seconds[f"{phase}_s"] += before.elapsed_time(after) * 1e-3 if self._is_cuda else after - before
        seconds["host_s"] = max(0.0, wall_s - sum(seconds.values()))
        seconds["wall_s"] = wall_s
        return seconds

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
