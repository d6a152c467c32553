"""Sequential temperature scaling: makes a drafter's confidence mean what it says (Cheng et al. 2026, section 3).

Schedulers rank drafts by survival, the product of the conditional confidences up to a draft, so it is that product that
has to be calibrated. Position by position, the earlier ones fixed, a grid is searched for the temperature that makes
the product's expected calibration error least. A temperature divides the confidence's logit, so at each position the
order of confidences stays.

Works on plain arrays: confidences [N, G] of N rounds, and how many of each round's drafts survived. A round that an end
cut short says nothing of the positions behind the cut; `num_known` says how many positions it speaks of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

EPSILON = 1e-6  # confidences are kept so far from 0 and 1, where a logit has no end
GRID = tuple(float(t) for t in np.round(np.geomspace(0.2, 5.0, 81), 6))
NUM_BINS = 15


@dataclass(frozen=True)
class Observations:
    """What was promised and what came.

    Args:
        confidence_NG: float64 in [0, 1], conditional on the drafts before.
        num_survived_N: int64 accepted drafts of each round.
        num_known_N: int64 positions that the round speaks of, at most G.

    Raises:
        ValueError: shapes that don't fit, or values out of range.
    """

    confidence_NG: Floats
    num_survived_N: Ints
    num_known_N: Ints

    def __post_init__(self) -> None:
        confidence, survived, known = self.confidence_NG, self.num_survived_N, self.num_known_N
        if confidence.ndim != 2 or survived.shape != known.shape or survived.shape != confidence.shape[:1]:
            shapes = f"{confidence.shape}, {survived.shape} and {known.shape}"
            raise ValueError(f"calibration: shapes {shapes}; needed are [N, G], [N] and [N]")
        if not ((confidence >= 0.0) & (confidence <= 1.0)).all():
            raise ValueError("calibration: confidences must lie in 0 to 1")
        if not ((survived >= 0) & (survived <= known) & (known <= confidence.shape[1])).all():
            raise ValueError("calibration: 0 <= survived <= known <= positions must hold in every round")

    @property
    def is_known(self) -> Bools:
        """bool [N, G]."""
        return np.arange(self.confidence_NG.shape[1]) < self.num_known_N[:, None]

    @property
    def survives(self) -> Bools:
        """bool [N, G]: whether the draft at each position, and all before it, were accepted."""
        return np.arange(self.confidence_NG.shape[1]) < self.num_survived_N[:, None]


@dataclass(frozen=True)
class Calibration:
    """One temperature a position; positions behind the last have the last one's.

    Raises:
        ValueError: none, or one that is not above 0.
    """

    temperatures: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.temperatures or not all(0.0 < t < float("inf") for t in self.temperatures):
            raise ValueError(
                f"calibration: temperatures {list(self.temperatures)} must be numbers above 0, at least one"
            )

    def at(self, num: int) -> list[float]:
        """Temperatures of the first `num` positions."""
        return [*self.temperatures, *[self.temperatures[-1]] * num][:num]

    def apply(self, confidence_NG: Floats) -> Floats:
        """Calibrated conditional confidences [N, G]."""
        return scale(confidence_NG, np.asarray(self.at(confidence_NG.shape[1]), dtype=np.float64))


def scale(confidence: Floats, temperature: Floats | float) -> Floats:
    """sigmoid(logit(confidence) / temperature)."""
    kept = np.clip(confidence, EPSILON, 1.0 - EPSILON)
    scaled: Floats = 1.0 / (1.0 + np.exp(-np.log(kept / (1.0 - kept)) / temperature))
    return scaled


def fit(observed: Observations, grid: Sequence[float] = GRID, num_bins: int = NUM_BINS) -> Calibration:
    """Temperatures of all positions, in order; a position that no round speaks of takes the one before it.

    Of equally good temperatures the one nearest to 1 wins.

    Raises:
        ValueError: an empty grid, or no rounds.
    """
    if not grid or not all(t > 0.0 for t in grid):
        raise ValueError(f"grid={list(grid)}: must hold temperatures above 0")
    if not len(observed.confidence_NG):
        raise ValueError("calibration: there are no rounds to fit on")
    order = sorted(grid, key=lambda t: abs(np.log(t)))
    temperatures: list[float] = []
    before_N = np.ones(len(observed.confidence_NG))
    for k in range(observed.confidence_NG.shape[1]):
        is_known, labels = observed.is_known[:, k], observed.survives[:, k]
        column = observed.confidence_NG[:, k]
        if is_known.any():
            errors = [
                expected_calibration_error((before_N * scale(column, t))[is_known], labels[is_known], num_bins)
                for t in order
            ]
            temperatures.append(order[int(np.argmin(errors))])
        else:
            temperatures.append(temperatures[-1] if temperatures else 1.0)
        before_N = before_N * scale(column, temperatures[-1])
    return Calibration(tuple(temperatures))


def expected_calibration_error(probability_N: Floats, label_N: Bools, num_bins: int = NUM_BINS) -> float:
    """Mean distance of promise and outcome over bins of equal width, weighted by size (Naeini et al. 2015)."""
    bins = np.minimum((probability_N * num_bins).astype(np.int64), num_bins - 1)
    promised = np.bincount(bins, weights=probability_N, minlength=num_bins)
    came = np.bincount(bins, weights=label_N.astype(np.float64), minlength=num_bins)
    return float(np.abs(promised - came).sum() / len(probability_N))


def brier_score(probability_N: Floats, label_N: Bools) -> float:
    """Mean squared distance of promise and outcome."""
    return float(np.square(probability_N - label_N).mean())


def area_under_curve(score_N: Floats, label_N: Bools) -> float | None:
    """Chance that a survivor scores above another draft, ties counting half; None without one of both."""
    num_yes = int(label_N.sum())
    num_no = len(label_N) - num_yes
    if not num_yes or not num_no:
        return None
    _, inverse, counts = np.unique(score_N, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    rank_N = (last - (counts - 1) / 2.0)[inverse]
    return float((rank_N[label_N].sum() - num_yes * (num_yes + 1) / 2.0) / (num_yes * num_no))


def reliability(probability_N: Floats, label_N: Bools, num_bins: int = NUM_BINS) -> list[dict[str, float | int]]:
    """The diagram's points: for each bin with something in it its mean promise, share of survivors, and size."""
    bins = np.minimum((probability_N * num_bins).astype(np.int64), num_bins - 1)
    return [
        {
            "bin": int(b),
            "promised": float(probability_N[bins == b].mean()),
            "came": float(label_N[bins == b].mean()),
            "num": int((bins == b).sum()),
        }
        for b in np.unique(bins)
    ]
