"""Verifies as many drafts as pay, given what a step costs here: DSpark's Algorithm 1 (Cheng et al. 2026, section 4).

With R rows and verify lengths l, a step has B = sum(1 + l) tokens and is expected to emit tau = sum(1 + survival of
each verified draft). The drafts of all rows are admitted one at a time, the likeliest first, while throughput tau /
seconds(B) rises, and the first that does not raise it ends the admission. That stop makes it lossless: whether a
draft is verified hangs on drafts at least as likely alone, never on those behind it, whose confidence knows the draft
itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dispark.decoding.target import TargetModel
from dispark.schedulers.profile import StepCosts
from dispark.schedulers.step_cost import Floats, StepCost
from dispark.schedulers.survival import best_first, lengths_of, survival_of
from dispark.types import Draft, Load, Outcome


def throughputs(ranked_survival: Floats, num_rows: int, cost: StepCost) -> Floats:
    """Expected tokens a second when the first 0, 1, ... of the ranked drafts are verified."""
    tokens = num_rows + np.concatenate([[0.0], np.cumsum(ranked_survival)])
    return tokens * cost.steps_per_s(num_rows + np.arange(len(tokens)))


class HardwareAwareScheduler:
    """Args: see `StepCosts`."""

    is_lossless = True

    def __init__(self, profile: str | None = None, cost: StepCost | None = None) -> None:
        self._costs = StepCosts(profile, cost)

    def bind(self, target: TargetModel) -> None:
        """Reads the profile. Raises ValueError if there is none, or one of another target or other hardware."""
        self._costs.bind(target)

    def draft_limit(self, load: Load) -> int | None:
        """As many as the drafter can."""
        return None

    def choose(self, draft: Draft, load: Load) -> list[int]:
        """See `dispark.interfaces.Scheduler`."""
        survival = survival_of(draft, "hardware_aware")
        order = best_first(survival)
        num_rows = len(draft.lengths)
        rates = throughputs(survival.ravel()[order], num_rows, self._costs.of(num_rows))
        falls = np.flatnonzero(np.diff(rates) <= 0.0)
        num_admitted = int(falls[0]) if len(falls) else len(order)
        return lengths_of(order[:num_admitted], survival.shape)

    def observe(self, outcome: Outcome, verify_lengths: Sequence[int], seconds: float) -> None:
        """Nothing to learn: the table is measured before."""
