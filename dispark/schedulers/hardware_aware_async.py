"""The hardware-aware scheduler of an engine that plans ahead (Cheng et al. 2026, section 5.2).

An engine that prepares its next steps while one is running has to know their size early, and a real cost curve has
dents at which Algorithm 1's stop gives up too soon. So the budget of a step is what would have been best two steps
before, over the whole curve and without the stop; the step then verifies so many of its likeliest drafts. The delay
is what keeps it lossless: a budget knows no token of the drafts it is spent on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from dispark.decoding.target import TargetModel
from dispark.schedulers.hardware_aware import remember, throughputs
from dispark.schedulers.profile import StepCosts
from dispark.schedulers.round_memory import Pace, RoundMemory
from dispark.schedulers.step_cost import StepCost
from dispark.schedulers.survival import best_first, lengths_of, survival_of
from dispark.types import Draft, Load, Outcome

DELAY = 2


class HardwareAwareAsyncScheduler:
    """The first steps, which have no budget yet, verify everything.

    Args: see `HardwareAwareScheduler`.
    """

    is_lossless = True

    def __init__(
        self,
        profile: str | None = None,
        cost: StepCost | Callable[[int], StepCost] | None = None,
        learns: bool = False,
        pace: Pace | None = None,
    ) -> None:
        self._costs, self._pace = StepCosts(profile, cost), pace
        self._learns, self._memory, self._has_drafts = learns, RoundMemory(pace), False
        self._budgets: deque[float] = deque()

    def bind(self, target: TargetModel) -> None:
        """Reads the profile. Raises ValueError if there is none, or one of another target or other hardware."""
        self._costs.bind(target)
        self._memory = RoundMemory(self._pace)
        self._budgets.clear()

    def draft_limit(self, load: Load) -> int | None:
        """As many as the drafter can, or nothing where that emits more."""
        return None if not self._learns or self._memory.should_draft(load.num_rows) else 0

    def choose(self, draft: Draft, load: Load) -> list[int]:
        """See `dispark.interfaces.Scheduler`."""
        self._has_drafts = any(draft.lengths)
        if not self._has_drafts:
            return list(draft.lengths)
        survival = survival_of(draft, "hardware_aware_async")
        order = best_first(survival)
        num_rows = len(draft.lengths)
        beyond_s = self._memory.beyond_s(num_rows)
        best = int(throughputs(survival.ravel()[order], num_rows, self._costs.of(num_rows), beyond_s).argmax())
        # Drafts a row: rows come and go between the two steps.
        self._budgets.append(best / num_rows)
        if len(self._budgets) <= DELAY:
            return list(draft.lengths)
        num_admitted = round(self._budgets.popleft() * num_rows)
        return lengths_of(order[:num_admitted], survival.shape)

    def observe(self, outcome: Outcome, verify_lengths: Sequence[int], seconds: float) -> None:
        """Remembers the round, if it learns."""
        if self._learns:
            remember(self._memory, self._costs, self._has_drafts, outcome, verify_lengths, seconds)
