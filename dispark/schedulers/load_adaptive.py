"""Steers how much is drafted by what drafting is worth now: a feedback controller on live telemetry.

Every round teaches it two things: how many drafts survived at each position, and what the round took with so many rows
and drafts. Estimates forget, so they follow the load. Every few rounds it chooses the draft length K that promises most
tokens a second,

    rows * (1 + sum of survival up to K) / seconds(rows, K),   seconds = a + b rows + c rows K,

and now and then one round tries another length, without which it would never learn what that costs. A ceiling on K
falls by one where a watched signal (utilisation, memory, PCIe traffic, queue, cache) is beyond its limit, and rises by
one where none is near. So drafting itself shrinks under load, not verification alone. Only past rounds decide about a
draft's length, so it doesn't anticipate.

Survival that is not measured for long drifts back towards hope, so that long drafts are tried again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dispark.decoding.target import TargetModel
from dispark.interfaces import Telemetry
from dispark.measure.telemetry import NullTelemetry
from dispark.types import Draft, Load, Outcome

Floats = npt.NDArray[np.float64]

SIGNALS = ("utilisation", "memory", "pcie_gb_per_s", "queue", "kv")
_NEAR = 0.9  # of a limit: the ceiling rises below it
_HOPE = 1.0  # weight, in drafts, of believing that an unmeasured position survives
_RIDGE = 1e-6


class LoadAdaptiveScheduler:
    """See the module.

    Args:
        window: rounds between two choices of K.
        probe_every: one round in so many tries another K.
        memory: share of what was learned that is left after a round, 0 to 1.
        limits: by signal, the value beyond which K has to fall; null, or leaving it out, doesn't watch it.
            `utilisation`, `memory` and `kv` are shares, `queue` is waiting requests for each row.
        telemetry: where utilisation, memory and PCIe traffic come from.
    """

    is_lossless = True

    def __init__(
        self,
        window: int = 4,
        probe_every: int = 16,
        memory: float = 0.98,
        limits: Mapping[str, float | None] | None = None,
        telemetry: Telemetry | None = None,
    ) -> None:
        for key, value, least in (("window", window, 1), ("probe_every", probe_every, 2)):
            if not isinstance(value, int) or value < least:
                raise ValueError(f"scheduler.{key}={value}: must be a whole number >= {least}")
        if not 0.0 < memory < 1.0:
            raise ValueError(f"scheduler.memory={memory}: must lie between 0 and 1")
        self._limits = _checked(limits or {})
        self._window, self._probe_every, self._memory = window, probe_every, memory
        self._telemetry: Telemetry = NullTelemetry() if telemetry is None else telemetry
        self._forget()

    def bind(self, target: TargetModel) -> None:
        """Forgets what another pass taught, and starts the telemetry."""
        self._forget()
        self._telemetry.bind(target.device)

    def _forget(self) -> None:
        self._begin(0)

    def _begin(self, most: int) -> None:
        """Of a drafter that proposes so many tokens; they are tried until something is known."""
        self._most = self._ceiling = self._length = most
        self._num_rounds = self._num_probes = 0
        # by position: accepted; verified with all before accepted
        self._hits, self._reached = np.zeros(most), np.zeros(most)
        self._normal_33, self._right_3 = np.zeros((3, 3)), np.zeros(3)

    def draft_limit(self, load: Load) -> int | None:
        """See `dispark.interfaces.Scheduler`."""
        if self._most != load.draft_length:
            self._begin(load.draft_length)
        if self._num_rounds % self._window == 0:
            self._steer(load)
        if self._num_rounds % self._probe_every == self._probe_every - 1:
            return self._probe()
        return self._length

    def choose(self, draft: Draft, load: Load) -> list[int]:
        """All that was drafted: the length was chosen before."""
        return list(draft.lengths)

    def observe(self, outcome: Outcome, verify_lengths: Sequence[int], seconds: float) -> None:
        """Learns from a round."""
        self._num_rounds += 1
        accepted_N = np.asarray(outcome.num_accepted)
        # Without a token of the target's own behind the drafts the round was cut, and what came behind nobody knows.
        is_cut_N = np.array([len(tokens) for tokens in outcome.emitted]) == accepted_N
        reached_N = np.where(is_cut_N, accepted_N, np.minimum(accepted_N + 1, verify_lengths))
        self._hits = self._memory * self._hits + _longer_than(accepted_N, len(self._hits))
        self._reached = self._memory * self._reached + _longer_than(reached_N, len(self._reached))
        rows = len(verify_lengths)
        x = np.array([1.0, rows, sum(verify_lengths)])
        self._normal_33 = self._memory * self._normal_33 + np.outer(x, x)
        self._right_3 = self._memory * self._right_3 + x * seconds

    # -- decisions ----------------------------------------------------------------------------------------------

    def survival(self) -> Floats:
        """Estimated chance that a draft survives up to each position, falling."""
        found: Floats = ((self._hits + _HOPE) / (self._reached + _HOPE)).cumprod().astype(np.float64)
        return found

    def seconds(self, rows: int, length: int) -> float:
        """Estimated time of a round, from those that are over."""
        size = self._normal_33.trace()
        beta_3 = np.linalg.solve(self._normal_33 + _RIDGE * size * np.eye(3), self._right_3)
        return max(1e-9, float(beta_3 @ np.array([1.0, rows, rows * length])))

    def _steer(self, load: Load) -> None:
        """Moves the ceiling by the signals, then takes the best length below it, if rounds have told any."""
        strain = max((value / limit for value, limit in self._watched(load)), default=0.0)
        if strain > 1.0:
            self._ceiling = max(0, self._ceiling - 1)
        elif strain < _NEAR:
            self._ceiling = min(self._most, self._ceiling + 1)
        if self._num_rounds == 0:
            self._length = self._ceiling
            return
        tokens = 1.0 + np.concatenate([[0.0], np.cumsum(self.survival())])
        rates = [tokens[k] / self.seconds(load.num_rows, k) for k in range(self._ceiling + 1)]
        self._length = int(np.argmax(rates))

    def _probe(self) -> int:
        """The allowed lengths in turns."""
        self._num_probes += 1
        return (self._ceiling - self._num_probes) % (self._ceiling + 1)

    def _watched(self, load: Load) -> list[tuple[float, float]]:
        """(value, limit) of each signal that is watched and known."""
        reading = self._telemetry.latest()
        pcie = reading.pcie_bytes_per_s
        values = {
            "utilisation": reading.utilisation,
            "memory": reading.memory_share,
            "pcie_gb_per_s": None if pcie is None else pcie / 1e9,
            "queue": load.num_waiting / max(1, load.num_rows),
            "kv": load.kv_share,
        }
        return [(value, self._limits[name]) for name in self._limits if (value := values[name]) is not None]


def _longer_than(lengths_N: npt.NDArray[np.int64], width: int) -> Floats:
    """How many of the lengths are above 0, 1, ... width - 1."""
    counts: Floats = (lengths_N[:, None] > np.arange(width)).sum(axis=0).astype(np.float64)
    return counts


def _checked(limits: Mapping[str, Any]) -> dict[str, float]:
    """The limits that are set. Raises ValueError for an unknown signal or a value that is no limit."""
    for name, value in limits.items():
        if name not in SIGNALS:
            raise ValueError(f"scheduler.limits.{name}: no such signal; allowed: {', '.join(SIGNALS)}")
        if value is not None and not value > 0:
            raise ValueError(f"scheduler.limits.{name}={value}: must be a number above 0, or null not to watch it")
    return {name: float(value) for name, value in limits.items() if value is not None}
