"""Which schedulers know what they must not."""

from __future__ import annotations

import pytest

from audit.test_output_law import JAGGED, LOSSLESS
from dispark.audit.anticipation import find_anticipation
from dispark.audit.controls import APPENDIX_A_COST, AppendixAWorld, RetrospectiveScheduler, WithoutStopScheduler
from dispark.audit.world import RandomWorld
from dispark.schedulers.hardware_aware import HardwareAwareScheduler


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("num_rows", [1, 2])
def test_lossless_schedulers_do_not_anticipate(name: str, num_rows: int) -> None:
    for seed in range(3):
        world = RandomWorld(vocab_size=2, draft_length=3 - num_rows + 1, num_rows=num_rows, seed=seed)
        assert find_anticipation(world, LOSSLESS[name], num_rounds=4) is None


def test_the_best_of_the_whole_curve_anticipates() -> None:
    assert find_anticipation(AppendixAWorld(), lambda: HardwareAwareScheduler(cost=APPENDIX_A_COST)) is None
    found = find_anticipation(AppendixAWorld(), lambda: WithoutStopScheduler(cost=APPENDIX_A_COST))
    assert found is not None
    assert (found.row, found.k) == (0, 1)
    assert sorted(found.lengths) == [0, 2]
    for seed in range(20):
        if find_anticipation(RandomWorld(num_rows=2, seed=seed), lambda: WithoutStopScheduler(cost=JAGGED)) is not None:
            return
    pytest.fail("in none of 20 random worlds did the faulty scheduler show")


def test_retrospective_survival_anticipates() -> None:
    found = find_anticipation(RandomWorld(vocab_size=2, num_rows=2, seed=2), RetrospectiveScheduler)
    assert found is not None
