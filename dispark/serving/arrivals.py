"""When requests arrive: from users who wait for their answers, at random, or as a recorded trace says.

A plan tells times only. Who is let in, and when, is up to source.py.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class Arrival:
    """One request to come.

    Args:
        at_s: seconds after the start; 0 for all where users wait.
        max_new_tokens: cap of its answer, or None for the run's own.
    """

    at_s: float
    max_new_tokens: int | None = None


class Arrivals(Protocol):
    """A plan of arrivals.

    `max_in_flight` is how many requests may be in the system at a time, None for any number.
    """

    max_in_flight: int | None

    def plan(self, num: int, seed: int) -> list[Arrival]:
        """`num` arrivals in order of time."""


class ClosedLoop:
    """So many users, each of whom asks again once the answer is there.

    Args:
        concurrency: users.
    """

    def __init__(self, concurrency: int) -> None:
        if not isinstance(concurrency, int) or concurrency < 1:
            raise ValueError(f"arrivals.concurrency={concurrency}: must be a whole number >= 1")
        self.max_in_flight: int | None = concurrency

    def plan(self, num: int, seed: int) -> list[Arrival]:
        """All are there from the start; the number in flight holds them back."""
        return [Arrival(0.0)] * num


class PoissonArrivals:
    """Independent users: gaps are exponential.

    Args:
        rate: requests a second.
    """

    def __init__(self, rate: float) -> None:
        if not 0.0 < rate < math.inf:
            raise ValueError(f"arrivals.rate={rate}: must be a number of requests a second above 0")
        self.rate = rate
        self.max_in_flight: int | None = None

    def plan(self, num: int, seed: int) -> list[Arrival]:
        """Times by the seed; the first comes after a gap too."""
        gaps = np.random.default_rng(seed).exponential(1.0 / self.rate, num)
        return [Arrival(float(at)) for at in gaps.cumsum()]


class TraceArrivals:
    """Times of a file, bursts and all: a JSON object a line with `at_s`, and `max_new_tokens` for a cap of its own.

    Args:
        path: the file; its times count from its first.
        speed: how many times as fast it is played.
    """

    def __init__(self, path: str, speed: float = 1.0) -> None:
        if not 0.0 < speed < math.inf:
            raise ValueError(f"arrivals.speed={speed}: must be a number above 0")
        self.max_in_flight: int | None = None
        self._arrivals = _read(Path(path), speed)

    def plan(self, num: int, seed: int) -> list[Arrival]:
        """The first `num`. Raises ValueError if the file has fewer."""
        if num > len(self._arrivals):
            raise ValueError(f"num_requests={num}: the trace has {len(self._arrivals)}; must be at most so many")
        return self._arrivals[:num]

    def __len__(self) -> int:
        return len(self._arrivals)


def _read(path: Path, speed: float) -> list[Arrival]:
    key = f"arrivals.path={path}"
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{key}: can't be read: {error}") from error
    found: list[tuple[float, int | None]] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            at_s, cap = float(row["at_s"]), row.get("max_new_tokens")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{key}: line {number} is no object with a number at_s") from error
        if not math.isfinite(at_s) or (cap is not None and (type(cap) is not int or cap < 1)):
            raise ValueError(f"{key}: line {number}: at_s must be finite, max_new_tokens a whole number >= 1")
        if found and at_s < found[-1][0]:
            raise ValueError(f"{key}: line {number}: at_s={at_s} lies before the line above; times must not fall")
        found.append((at_s, cap))
    if not found:
        raise ValueError(f"{key}: has no arrivals")
    return [Arrival((at_s - found[0][0]) / speed, cap) for at_s, cap in found]
