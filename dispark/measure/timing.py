"""One clock for the phases of a step.

On CUDA a phase is the time between two events on the stream. The events are read once the pass is over, so that
measuring adds no synchronisation to a round; elsewhere a phase is host time. What the phases don't cover is host time.
The clock does not know what the phases are.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch

PHASES = ("draft", "schedule", "verify", "accept", "commit")


class PhaseClock:
    """Times one step at a time: `start`, any number of `mark`s, `stop`; `resolve` ends a pass.

    Args:
        device: where the phases' work runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._start_s = 0.0
        self._marks: list[tuple[str, Any]] = []
        self._unread: list[tuple[dict[str, Any], list[tuple[str, Any]]]] = []

    def start(self) -> None:
        """Begins a step."""
        self._start_s = time.perf_counter()
        self._marks = [("", self._now() if self._is_cuda else self._start_s)]

    def mark(self, phase: str) -> None:
        """Ends the named phase; the next one begins. A phase may come twice: its times add up."""
        self._marks.append((phase, self._now()))

    def stop(self) -> dict[str, Any]:
        """Ends the step.

        Returns:
            seconds: `wall_s` on the host; `<phase>_s` for each of PHASES and `host_s` = wall_s minus the phases, which
            on CUDA are filled into this very dict by `resolve`.
        """
        seconds: dict[str, Any] = {"wall_s": time.perf_counter() - self._start_s}
        self._unread.append((seconds, self._marks))
        if not self._is_cuda:
            self.resolve()
        return seconds

    def resolve(self) -> None:
        """Fills the phases of every step since the last call; waits for the device."""
        if self._is_cuda:
            torch.cuda.synchronize(self._device)
        for seconds, marks in self._unread:
            seconds |= dict.fromkeys((f"{phase}_s" for phase in PHASES), 0.0)
            for (_, before), (phase, after) in pairwise(marks):
                if phase in PHASES:
                    seconds[f"{phase}_s"] += before.elapsed_time(after) * 1e-3 if self._is_cuda else after - before
            covered = sum(seconds[f"{phase}_s"] for phase in PHASES)
            seconds["host_s"] = max(0.0, seconds["wall_s"] - covered)
        self._unread.clear()

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
