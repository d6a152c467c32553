"""A measured table of step costs: between, below and beyond its points."""

from __future__ import annotations

import pytest

from dispark.schedulers.step_cost import StepCost

TABLE = StepCost((2, 4, 8), (1.0, 3.0, 4.0))


def test_times_between_below_and_beyond() -> None:
    assert TABLE.seconds_at([2, 3, 4, 6, 8]).tolist() == [1.0, 2.0, 3.0, 3.5, 4.0]
    assert TABLE.seconds_at(1) == 1.0
    assert TABLE.seconds_at(16) == pytest.approx(6.0)  # the last slope goes on
    assert TABLE.steps_per_s([4]).tolist() == [1 / 3]


def test_a_curve_that_ends_falling_does_not_fall_on() -> None:
    assert StepCost((1, 2), (2.0, 1.5)).seconds_at(100) == 1.5
    assert StepCost((3,), (2.0,)).seconds_at([1, 3, 9]).tolist() == [2.0, 2.0, 2.0]


def test_medians_of_samples() -> None:
    cost = StepCost.of_samples({4: [3.0, 9.0, 2.0], 1: [1.0]})
    assert cost == StepCost((1, 4), (1.0, 3.0))


@pytest.mark.parametrize(
    ("tokens", "seconds", "words"),
    [
        ((), (), "0 token counts"),
        ((1, 2), (1.0,), "2 token counts for 1 times"),
        ((2, 2), (1.0, 1.0), "must be ascending"),
        ((0, 2), (1.0, 1.0), "at least 1"),
        ((1, 2), (1.0, 0.0), "must be seconds above 0"),
        ((1, 2), (1.0, float("nan")), "must be seconds above 0"),
    ],
)
def test_tables_that_make_no_sense(tokens: tuple[int, ...], seconds: tuple[float, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        StepCost(tokens, seconds)
