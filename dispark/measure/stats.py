"""Intervals for ratios of sums: a paired percentile bootstrap over prompts.

A figure such as MATL or tokens/s is one sum divided by another, over all prompts. The unit that is redrawn is the
prompt (all its turns and repeats together), because rounds and tokens of one prompt resemble each other. Where two arms
ran the same prompts, both are redrawn together, so what makes a prompt easy or hard for both cancels out of the ratio.

The module works on plain arrays with one row a prompt. It knows nothing of runs, arms or column names, and it can't see
drift between passes or machines: an interval covers the choice of prompts only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

NUM_DRAWS = 10_000
LEVEL = 0.95
_MAX_UNDEFINED_SHARE = 0.05
_CHUNK_CELLS = 1 << 22  # draws x prompts held at once: 32 MiB of counts

Floats = npt.NDArray[np.float64]
Statistic = Callable[[Floats], Floats]


@dataclass(frozen=True)
class Estimate:
    """A figure and its interval.

    Args:
        value: the point estimate from all prompts, or None.
        low: lower end of the interval, or None where there is no interval.
        high: upper end of the interval, or None where there is no interval.
        reason: why the value or the interval is missing, else None.
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    reason: str | None = None

    @property
    def interval(self) -> list[float] | None:
        """[low, high], or None; the form that goes into JSON."""
        return None if self.low is None or self.high is None else [self.low, self.high]


def resample_sums(values_PQ: npt.ArrayLike, num_draws: int = NUM_DRAWS, seed: int = 0) -> Floats:
    """Draws P prompts with replacement, num_draws times, and sums each of the Q columns over them.

    Args:
        values_PQ: one row a prompt, one column a quantity.
        num_draws: number of draws.
        seed: same seed and same number of prompts give the same draws, whatever the quantities.

    Returns:
        Float64 [num_draws, Q].
    """
    values = np.asarray(values_PQ, dtype=np.float64)
    counts = _draw_counts(values.shape[0], num_draws, seed)
    chunk = max(1, _CHUNK_CELLS // max(1, values.shape[0]))
    return np.concatenate([counts[i : i + chunk].astype(np.float64) @ values for i in range(0, num_draws, chunk)])


def bootstrap(
    values_PQ: npt.ArrayLike,
    statistic: Statistic,
    *,
    num_draws: int = NUM_DRAWS,
    seed: int = 0,
    level: float = LEVEL,
) -> Estimate:
    """Percentile interval of a statistic of column sums (Efron and Tibshirani 1993, chapter 13).

    Args:
        values_PQ: one row a prompt, one column a quantity.
        statistic: maps sums [D, Q] to figures [D]; a figure that is not finite counts as undefined.
        num_draws: number of draws.
        seed: seed of the draws.
        level: coverage aimed at, in (0, 1).

    Returns:
        The estimate; it has no interval for fewer than two prompts, nor where over 5 % of the draws are undefined.
    """
    values = np.asarray(values_PQ, dtype=np.float64)
    if values.shape[0] == 0:
        return Estimate(None, reason="there are no prompts")
    if not np.isfinite(values).all():
        return Estimate(None, reason="a prompt has no measured value")
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(statistic(values.sum(axis=0, keepdims=True))[0])
        if not math.isfinite(value):
            return Estimate(None, reason="the denominator is zero")
        if values.shape[0] == 1:
            return Estimate(value, reason="one prompt: nothing to redraw")
        draws = statistic(resample_sums(values, num_draws, seed))
    defined = draws[np.isfinite(draws)]
    undefined_share = 1.0 - defined.size / num_draws
    if undefined_share > _MAX_UNDEFINED_SHARE:
        return Estimate(value, reason=f"the denominator is zero in {undefined_share:.0%} of the draws")
    tail = (1.0 - level) / 2.0
    low, high = np.quantile(defined, [tail, 1.0 - tail])
    return Estimate(value, float(low), float(high))


def ratio_of_sums(
    numerator_P: npt.ArrayLike,
    denominator_P: npt.ArrayLike,
    *,
    num_draws: int = NUM_DRAWS,
    seed: int = 0,
    level: float = LEVEL,
) -> Estimate:
    """sum(numerator) / sum(denominator) over prompts, for MATL and tokens/s."""
    return bootstrap(
        _columns(numerator_P, denominator_P),
        quotient,
        num_draws=num_draws,
        seed=seed,
        level=level,
    )


def ratio_of_ratios(
    numerator_P: npt.ArrayLike,
    denominator_P: npt.ArrayLike,
    reference_numerator_P: npt.ArrayLike,
    reference_denominator_P: npt.ArrayLike,
    *,
    num_draws: int = NUM_DRAWS,
    seed: int = 0,
    level: float = LEVEL,
) -> Estimate:
    """One ratio of sums over another, paired by prompt, for speed-ups: row i of all four is the same prompt."""
    return bootstrap(
        _columns(numerator_P, denominator_P, reference_numerator_P, reference_denominator_P),
        quotient_of_quotients,
        num_draws=num_draws,
        seed=seed,
        level=level,
    )


def quotient(sums_DQ: Floats) -> Floats:
    """The statistic of a ratio of sums: column 0 over column 1."""
    return sums_DQ[:, 0] / sums_DQ[:, 1]


def quotient_of_quotients(sums_DQ: Floats) -> Floats:
    """The statistic of a ratio of ratios: columns 0 over 1, over 2 over 3."""
    return (sums_DQ[:, 0] / sums_DQ[:, 1]) / (sums_DQ[:, 2] / sums_DQ[:, 3])


@dataclass(frozen=True)
class PromptSums:
    """A figure before it is computed: what each prompt adds to it, and what the sums become.

    Args:
        values_PQ: one row a prompt, one column a quantity.
        statistic: maps sums [D, Q] to figures [D].
    """

    values_PQ: Floats
    statistic: Statistic

    def estimate(self, seed: int = 0) -> Estimate:
        """The figure with its interval."""
        return bootstrap(self.values_PQ, self.statistic, seed=seed)


def mean_over_tasks(
    tasks: Sequence[PromptSums],
    *,
    is_geometric: bool = False,
    num_draws: int = NUM_DRAWS,
    seed: int = 0,
    level: float = LEVEL,
) -> Estimate:
    """A figure's mean over tasks, each counted once: prompts are redrawn within their task (a stratified bootstrap).

    Args:
        tasks: the figure of each task.
        is_geometric: the geometric mean, for ratios.
        num_draws: number of draws.
        seed: seed of the draws; tasks of one size don't share theirs.
        level: coverage aimed at, in (0, 1).

    Returns:
        The estimate; without a value if a task has none, without an interval if a task has none.
    """
    values, draws = [], []
    reason = None if tasks else "there are no tasks"
    for i, task in enumerate(tasks):
        estimate = task.estimate(seed)
        if estimate.value is None:
            return Estimate(None, reason=estimate.reason)
        values.append(estimate.value)
        reason = reason or (estimate.reason if estimate.interval is None else None)
        if reason is None:
            own_seed = int(np.random.SeedSequence([seed, i]).generate_state(1)[0])
            with np.errstate(divide="ignore", invalid="ignore"):
                draws.append(task.statistic(resample_sums(task.values_PQ, num_draws, own_seed)))
    if not values:
        return Estimate(None, reason=reason)
    value = geometric_mean(values) if is_geometric else math.fsum(values) / len(values)
    if reason is not None or value is None:
        return Estimate(value, reason=reason or "a ratio is not positive")
    with np.errstate(divide="ignore", invalid="ignore"):
        stacked = np.stack(draws)
        means = np.exp(np.log(stacked).mean(axis=0)) if is_geometric else stacked.mean(axis=0)
    tail = (1.0 - level) / 2.0
    low, high = np.quantile(means[np.isfinite(means)], [tail, 1.0 - tail])
    return Estimate(value, float(low), float(high))


def is_distinguishable(estimate: Estimate) -> bool | None:
    """Whether a ratio's interval excludes 1; None where there is no interval."""
    if estimate.low is None or estimate.high is None:
        return None
    return estimate.low > 1.0 or estimate.high < 1.0


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Geometric mean of positive ratios; None for no values, or where one of them is missing or not positive."""
    known: list[float] = []
    for value in values:
        if value is None or not value > 0.0 or math.isinf(value):
            return None
        known.append(math.log(value))
    return math.exp(math.fsum(known) / len(known)) if known else None


@lru_cache(maxsize=8)
def _draw_counts(num_prompts: int, num_draws: int, seed: int) -> npt.NDArray[np.uint8]:
    """How often each prompt is in each draw, [num_draws, P]; kept, since a summary uses the same draws many times."""
    generator = np.random.default_rng(seed)
    chunk = max(1, _CHUNK_CELLS // max(1, num_prompts))
    # A count is about Poisson with mean 1, so a byte is ample.
    counts = np.empty((num_draws, num_prompts), dtype=np.uint8)
    for start in range(0, num_draws, chunk):
        size = min(chunk, num_draws - start)
        picks = generator.integers(0, num_prompts, size=(size, num_prompts))
        picks += np.arange(size)[:, None] * num_prompts
        drawn = np.bincount(picks.ravel(), minlength=size * num_prompts).reshape(size, num_prompts)
        assert drawn.max() <= 255, "a prompt was drawn more often than a byte can hold"
        counts[start : start + size] = drawn
    counts.flags.writeable = False
    return counts


def _columns(*quantities: npt.ArrayLike) -> Floats:
    columns: Sequence[Floats] = [np.asarray(quantity, dtype=np.float64) for quantity in quantities]
    assert all(column.ndim == 1 and column.shape == columns[0].shape for column in columns), "one value a prompt"
    return np.stack(columns, axis=1)
