"""The hardware-aware scheduler of an engine that plans ahead (Cheng et al. 2026, section 5.2).

An engine that prepares its next steps while one is running has to know their size early, and a real cost curve has
dents at which Algorithm 1's stop gives up too soon. So the budget of a step is what would have been best two steps
before, over the whole curve and without the stop; the step then verifies so many of its likeliest drafts. The delay
is what keeps it lossless: a budget knows no token of the drafts it is spent on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from dispark.decoding.target import TargetModel
from dispark.schedulers.hardware_aware import throughputs
from dispark.schedulers.profile import StepCosts
from dispark.schedulers.step_cost import StepCost
from dispark.schedulers.survival import best_first, lengths_of, survival_of
from dispark.types import Draft, Load, Outcome

DELAY = 2


class HardwareAwareAsyncScheduler:
    """The first steps, which have no budget yet, verify everything. Args: see `StepCosts`."""

    is_lossless = True

    def __init__(self, profile: str | None = None, cost: StepCost | None = None) -> None:
        self._costs = StepCosts(profile, cost)
        self._budgets: deque[float] = deque()

    def bind(self, target: TargetModel) -> None:
        """Reads the profile. Raises ValueError if there is none, or one of another target or other hardware."""
        self._costs.bind(target)
        self._budgets.clear()

    def draft_limit(self, load: Load) -> int | None:
        """As many as the drafter can."""
        return None

    def choose(self, draft: Draft, load: Load) -> list[int]:
        """See `dispark.interfaces.Scheduler`."""
        survival = survival_of(draft, "hardware_aware_async")
        order = best_first(survival)
        num_rows = len(draft.lengths)
        best = int(throughputs(survival.ravel()[order], num_rows, self._costs.of(num_rows)).argmax())
        # Drafts a row: rows come and go between the two steps.
        self._budgets.append(best / num_rows)
        if len(self._budgets) <= DELAY:
            return list(draft.lengths)
        num_admitted = round(self._budgets.popleft() * num_rows)
        return lengths_of(order[:num_admitted], survival.shape)

    def observe(self, outcome: Outcome, verify_lengths: Sequence[int], seconds: float) -> None:
        """Nothing to learn: the table is measured before."""
