"""What a step costs by the tokens in it: a measured table, never an assumption.

Packed verification sees the tokens of all rows side by side, so a step's time is a function of their number B. The
table holds medians of measured times; between two of them the time is interpolated, beyond the last it goes on with
the last slope. Real curves are jagged and nothing here smooths them.

It knows neither schedulers nor how the times were measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step by its tokens.

    Args:
        num_tokens: ascending, at least one.
        seconds: positive, one each.

    Raises:
        ValueError: a table that is empty, not ascending, or not positive.
    """

    num_tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        tokens = list(self.num_tokens)
        if not tokens or len(tokens) != len(self.seconds):
            raise ValueError(f"step cost: {len(tokens)} token counts for {len(self.seconds)} times; one each is needed")
        if tokens[0] < 1 or any(b <= a for a, b in pairwise(tokens)):
            raise ValueError(f"step cost: token counts {tokens} must be ascending and at least 1")
        if not all(0.0 < s < float("inf") for s in self.seconds):
            raise ValueError(f"step cost: times {list(self.seconds)} must be seconds above 0")

    @staticmethod
    def of_samples(samples_s: Mapping[int, Sequence[float]]) -> StepCost:
        """The medians of several measured times for each number of tokens."""
        order = sorted(samples_s)
        return StepCost(tuple(order), tuple(float(np.median(samples_s[num])) for num in order))

    def seconds_at(self, num_tokens: npt.ArrayLike) -> Floats:
        """float64 seconds of steps with so many tokens."""
        at = np.asarray(num_tokens, dtype=np.float64)
        x, y = np.asarray(self.num_tokens, dtype=np.float64), np.asarray(self.seconds, dtype=np.float64)
        found = np.interp(at, x, y)
        if len(x) > 1:
            slope = max(0.0, float((y[-1] - y[-2]) / (x[-1] - x[-2])))
            found = np.where(at > x[-1], y[-1] + slope * (at - x[-1]), found)
        return found

    def steps_per_s(self, num_tokens: npt.ArrayLike) -> Floats:
        """SPS(B) of the paper: steps a second with so many tokens each."""
        return 1.0 / self.seconds_at(num_tokens)
