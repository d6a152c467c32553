"""How well confidences keep their promise: ECE, AUC and Brier score of survival by position, before and after.

Values are exact; intervals redraw prompts, of whose rounds sums are kept (for AUC: counts at so many levels of the
score). It knows neither decoding nor files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dispark.measure.stats import Estimate, bootstrap
from dispark.schedulers.calibration import (
    Bools,
    Calibration,
    Floats,
    Ints,
    Observations,
    area_under_curve,
    brier_score,
    expected_calibration_error,
    reliability,
)

NUM_LEVELS = 256  # of the scores whose ranks the intervals of AUC redraw


@dataclass(frozen=True)
class Rounds:
    """Observations with the prompt that each round belongs to (an index)."""

    observed: Observations
    prompt_N: Ints

    def part(self, is_in_N: Bools) -> Rounds:
        o = self.observed
        kept = Observations(o.confidence_NG[is_in_N], o.num_survived_N[is_in_N], o.num_known_N[is_in_N])
        return Rounds(kept, self.prompt_N[is_in_N])


def report(found: Rounds, calibration: Calibration, num_bins: int, seed: int = 0) -> list[dict[str, Any]]:
    """A line a position: its temperature, and ECE, AUC and Brier score of survival before and after, as Estimates."""
    o = found.observed
    before_NG, after_NG = (np.cumprod(c, axis=1) for c in (o.confidence_NG, calibration.apply(o.confidence_NG)))
    lines = []
    for k in range(o.confidence_NG.shape[1]):
        is_in = o.is_known[:, k]
        if not is_in.any():
            continue
        label_N, prompt_N = o.survives[is_in, k], found.prompt_N[is_in]
        line: dict[str, Any] = {
            "position": k + 1,
            "temperature": calibration.at(k + 1)[k],
            "survives": float(label_N.mean()),
            "num_rounds": int(is_in.sum()),
        }
        for name, probability_NG in (("before", before_NG), ("after", after_NG)):
            measures = _measures(probability_NG[is_in, k], label_N, prompt_N, num_bins, seed)
            line |= {f"{key}_{name}": value for key, value in measures.items()}
        lines.append(line)
    return lines


def diagrams(o: Observations, calibration: Calibration, num_bins: int) -> list[dict[str, Any]]:
    """Reliability of survival at each position, before and after."""
    before_NG, after_NG = (np.cumprod(c, axis=1) for c in (o.confidence_NG, calibration.apply(o.confidence_NG)))
    found = []
    for k in range(o.confidence_NG.shape[1]):
        is_in = o.is_known[:, k]
        if is_in.any():
            label_N = o.survives[is_in, k]
            both = [reliability(values[is_in, k], label_N, num_bins) for values in (before_NG, after_NG)]
            found.append({"position": k + 1, "before": both[0], "after": both[1]})
    return found


def _measures(probability_N: Floats, label_N: Bools, prompt_N: Ints, num_bins: int, seed: int) -> dict[str, Estimate]:
    """The three measures; their values are exact, their intervals redraw prompts."""
    names, index_N = np.unique(prompt_N, return_inverse=True)
    num = len(names)

    def sums(cell_N: Ints, weight_N: Floats, width: int) -> Floats:
        flat: Floats = np.bincount(index_N * width + cell_N, weights=weight_N, minlength=num * width).astype(np.float64)
        return flat.reshape(num, width)

    bin_N = np.minimum((probability_N * num_bins).astype(np.int64), num_bins - 1)
    hits_N = label_N.astype(np.float64)
    zero_N = np.zeros(len(label_N), dtype=np.int64)
    gap_PQ = sums(bin_N, probability_N - hits_N, num_bins)
    count_PQ = sums(zero_N, np.ones(len(label_N)), 1)
    square_PQ = sums(zero_N, np.square(probability_N - hits_N), 1)
    edges = np.unique(np.quantile(probability_N, np.linspace(0, 1, NUM_LEVELS + 1)[1:-1]))
    level_N = np.searchsorted(edges, probability_N, side="left")
    width = len(edges) + 1
    yes_PQ, no_PQ = sums(level_N, hits_N, width), sums(level_N, 1.0 - hits_N, width)

    def ece(sums_DQ: Floats) -> Floats:
        return np.abs(sums_DQ[:, :-1]).sum(axis=1) / sums_DQ[:, -1]

    def brier(sums_DQ: Floats) -> Floats:
        return sums_DQ[:, 0] / sums_DQ[:, 1]

    def auc(sums_DQ: Floats) -> Floats:
        yes, no = sums_DQ[:, :width], sums_DQ[:, width:]
        below = np.cumsum(no, axis=1) - no / 2.0
        return (yes * below).sum(axis=1) / (yes.sum(axis=1) * no.sum(axis=1))

    def estimate(values_PQ: Floats, statistic: Callable[[Floats], Floats], value: float | None) -> Estimate:
        around = bootstrap(values_PQ, statistic, seed=seed)
        return Estimate(value, around.low, around.high, around.reason)

    return {
        "ece": estimate(
            np.hstack([gap_PQ, count_PQ]), ece, expected_calibration_error(probability_N, label_N, num_bins)
        ),
        "auc": estimate(np.hstack([yes_PQ, no_PQ]), auc, area_under_curve(probability_N, label_N)),
        "brier": estimate(np.hstack([square_PQ, count_PQ]), brier, brier_score(probability_N, label_N)),
    }
