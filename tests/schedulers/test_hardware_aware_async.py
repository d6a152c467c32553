"""The scheduler that plans two steps ahead: its budget, its delay, and rows that come and go."""

from __future__ import annotations

import torch

from dispark.schedulers.hardware_aware_async import HardwareAwareAsyncScheduler
from dispark.schedulers.step_cost import StepCost
from dispark.types import Draft, Load

# A dent behind the third token, which Algorithm 1's stop would not get past.
DENTED = StepCost((1, 2, 3, 4), (1.0, 2.0, 2.05, 2.1))


def draft_of(*confidence: list[float]) -> Draft:
    num, width = len(confidence), len(confidence[0])
    return Draft(torch.zeros(num, width, dtype=torch.int64), [width] * num, None, torch.tensor(confidence))


def test_a_budget_is_spent_two_steps_later() -> None:
    scheduler = HardwareAwareAsyncScheduler(cost=DENTED)
    steps = [[1.0, 1.0, 1.0], [0.1, 0.1, 0.1], [0.2, 0.1, 0.1], [0.9, 0.9, 0.9], [0.9, 0.9, 0.9]]
    found = [scheduler.choose(draft_of(confidence), Load(1, 0, i, [9])) for i, confidence in enumerate(steps)]
    # Steps 0 and 1 have no budget yet; step 2 has that of step 0, 3 drafts; steps 3 and 4 have those of 1 and 2, none.
    assert found == [[3], [3], [3], [0], [0]]


def test_the_whole_curve_counts() -> None:
    """Throughput is 1, then 0.95, 1.4 and 1.8: all three pay although the first alone doesn't."""
    scheduler = HardwareAwareAsyncScheduler(cost=DENTED)
    for step in range(3):
        lengths = scheduler.choose(draft_of([0.95, 0.99, 0.99]), Load(1, 0, step, [9]))
    assert lengths == [3]


def test_a_budget_goes_by_row() -> None:
    scheduler = HardwareAwareAsyncScheduler(cost=StepCost((1, 100), (1.0, 1.0)))
    for step in range(2):
        scheduler.choose(draft_of([1.0, 1.0], [1.0, 0.0]), Load(2, 0, step, [9, 9]))
    # 3 drafts for 2 rows are 6 for 4, and the likeliest get them.
    found = scheduler.choose(draft_of([0.9, 0.9], [0.5, 0.1], [0.8, 0.7], [0.6, 0.2]), Load(4, 0, 2, [9] * 4))
    assert found == [2, 1, 2, 1]
    assert scheduler.choose(draft_of([1.0, 1.0]), Load(1, 0, 3, [9])) == [2]
