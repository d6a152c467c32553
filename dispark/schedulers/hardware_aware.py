"""Verifies as many drafts as pay, given what a step costs here: DSpark's Algorithm 1 (Cheng et al. 2026, section 4).

With R rows and verify lengths l, a step has B = sum(1 + l) tokens and is expected to emit tau = sum(1 + survival of
each verified draft). The drafts of all rows are admitted one at a time, the likeliest first, while throughput tau /
seconds(B) rises, and the first that does not raise it ends the admission. That stop makes it lossless: whether a
draft is verified hangs on drafts at least as likely alone, never on those behind it, whose confidence knows the draft
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dispark.decoding.target import TargetModel
from dispark.schedulers.profile import StepCosts
from dispark.schedulers.round_memory import Pace, RoundMemory
from dispark.schedulers.step_cost import Floats, StepCost
from dispark.schedulers.survival import best_first, lengths_of, survival_of
from dispark.types import Draft, Load, Outcome


def throughputs(ranked_survival: Floats, num_rows: int, cost: StepCost, beyond_s: float = 0.0) -> Floats:
    """Expected tokens a second when the first 0, 1, ... of the ranked drafts are verified; a round takes `beyond_s`
    whatever is verified."""
    tokens = num_rows + np.concatenate([[0.0], np.cumsum(ranked_survival)])
    found: Floats = tokens / (cost.seconds_at(num_rows + np.arange(len(tokens))) + beyond_s)
    return found


class HardwareAwareScheduler:
    """See the module.

    Args:
        profile, cost: see `StepCosts`.
        learns: adds what rounds take beyond their verify, and leaves drafting out where rounds without drafts emit more
            a second, both from rounds that are over. False plans with the table alone, as the paper's algorithm is
            written, and always drafts.
        pace: how soon learning compares; None is the usual.
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
        self._learns, self._memory = learns, RoundMemory(pace)
        self._has_drafts = False

    def bind(self, target: TargetModel) -> None:
        """Reads the profile. Raises ValueError if there is none, or one of another target or other hardware."""
        self._costs.bind(target)
        self._memory = RoundMemory(self._pace)

    def draft_limit(self, load: Load) -> int | None:
        """As many as the drafter can, or nothing where that emits more."""
        return None if not self._learns or self._memory.should_draft(load.num_rows) else 0

    def choose(self, draft: Draft, load: Load) -> list[int]:
        """See `dispark.interfaces.Scheduler`."""
        self._has_drafts = any(draft.lengths)
        survival = survival_of(draft, "hardware_aware")
        order = best_first(survival)
        num_rows = len(draft.lengths)
        beyond_s = self._memory.beyond_s(num_rows)
        rates = throughputs(survival.ravel()[order], num_rows, self._costs.of(num_rows), beyond_s)
        falls = np.flatnonzero(np.diff(rates) <= 0.0)
        num_admitted = int(falls[0]) if len(falls) else len(order)
        return lengths_of(order[:num_admitted], survival.shape)

    def observe(self, outcome: Outcome, verify_lengths: Sequence[int], seconds: float) -> None:
        """Remembers the round, if it learns."""
        if self._learns:
            remember(self._memory, self._costs, self._has_drafts, outcome, verify_lengths, seconds)


def remember(
    memory: RoundMemory,
    costs: StepCosts,
    has_drafts: bool,
    outcome: Outcome,
    verify_lengths: Sequence[int],
    seconds: float,
) -> None:
    """Puts a round into a memory, against what its verify should have taken."""
    num_rows = len(verify_lengths)
    estimate_s = float(costs.of(num_rows).seconds_at(num_rows + sum(verify_lengths)))
    memory.observe(num_rows, sum(map(len, outcome.emitted)), seconds, estimate_s, has_drafts)
