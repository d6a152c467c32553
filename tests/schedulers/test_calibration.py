"""Temperatures that undo a known distortion, and the measures of calibration against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispark.schedulers.calibration import (
    Calibration,
    Observations,
    area_under_curve,
    brier_score,
    expected_calibration_error,
    fit,
    reliability,
    scale,
)


def simulate(temperatures: tuple[float, ...], num: int = 20_000, seed: int = 0) -> Observations:
    """Rounds whose true conditional rates are what the confidences become when scaled by the temperatures."""
    generator = np.random.default_rng(seed)
    true = generator.beta(4.0, 2.0, (num, len(temperatures)))
    said = scale(true, 1.0 / np.array(temperatures))
    survived = (generator.random(true.shape) < true).cumprod(axis=1).sum(axis=1)
    return Observations(said, survived, np.full(num, len(temperatures)))


def test_it_finds_the_temperatures_that_undo_a_distortion() -> None:
    observed = simulate((2.0, 0.5, 1.0))
    found = fit(observed)
    assert found.temperatures == pytest.approx((2.0, 0.5, 1.0), rel=0.12)
    before, after = observed.confidence_NG.cumprod(axis=1), found.apply(observed.confidence_NG).cumprod(axis=1)
    for k in range(3):
        labels = observed.survives[:, k]
        assert expected_calibration_error(after[:, k], labels) < 0.015
        if k == 0:
            assert expected_calibration_error(before[:, k], labels) > 0.04
            assert area_under_curve(after[:, k], labels) == pytest.approx(area_under_curve(before[:, k], labels))


def test_what_is_calibrated_stays_as_it_is() -> None:
    assert fit(simulate((1.0, 1.0))).temperatures == pytest.approx((1.0, 1.0), rel=0.1)


def test_earlier_positions_are_fixed_before_later_ones() -> None:
    """A later position is fitted to the product: its own temperature makes up for nothing that was mended before."""
    whole, first = fit(simulate((3.0, 1.0))), fit(simulate((3.0,)))
    assert whole.temperatures[0] == pytest.approx(first.temperatures[0], rel=0.15)
    assert whole.temperatures[1] == pytest.approx(1.0, rel=0.15)


def test_positions_behind_a_cut_say_nothing() -> None:
    observed = simulate((2.0, 1.0), num=4_000)
    known = observed.num_known_N.copy()
    known[::2] = 1
    cut = Observations(observed.confidence_NG, np.minimum(observed.num_survived_N, known), known)
    # Cut rounds as failures would have made the second position's temperature extreme.
    assert fit(cut).temperatures[1] == pytest.approx(1.0, rel=0.3)
    never = Observations(observed.confidence_NG, np.minimum(observed.num_survived_N, 1), np.ones_like(known))
    assert fit(never).temperatures[1] == fit(never).temperatures[0]


def test_the_last_temperature_serves_longer_drafts() -> None:
    values = np.array([[0.9, 0.9, 0.9]])
    found = Calibration((1.0, 2.0)).apply(values)
    assert found[0, 0] == pytest.approx(0.9)
    assert found[0, 1] == found[0, 2] < 0.9
    assert Calibration((1.0, 2.0)).apply(values[:, :1]).shape == (1, 1)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=30), st.floats(0.2, 5.0))
def test_scaling_keeps_the_order_and_the_range(values: list[float], temperature: float) -> None:
    found = scale(np.array(sorted(values)), temperature)
    assert (np.diff(found) >= 0).all()
    assert ((found >= 0) & (found <= 1)).all()
    assert scale(np.array([0.5]), temperature)[0] == pytest.approx(0.5)


def test_the_measures_by_hand() -> None:
    probability, label = np.array([0.1, 0.1, 0.9, 0.8]), np.array([False, True, True, True])
    # Two bins: 0.1 promised against 0.5, and 0.85 against 1, half of the drafts each.
    assert expected_calibration_error(probability, label, num_bins=2) == pytest.approx(0.5 * 0.4 + 0.5 * 0.15)
    assert brier_score(probability, label) == pytest.approx((0.01 + 0.81 + 0.01 + 0.04) / 4)
    assert area_under_curve(probability, label) == pytest.approx((0.5 + 1 + 1) / 3)
    assert area_under_curve(probability, np.ones(4, dtype=bool)) is None
    assert reliability(probability, label, 2) == [
        {"bin": 0, "promised": pytest.approx(0.1), "came": 0.5, "num": 2},
        {"bin": 1, "promised": pytest.approx(0.85), "came": 1.0, "num": 2},
    ]
    assert expected_calibration_error(np.array([1.0]), np.array([True])) == 0.0


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=2, max_size=12))
def test_the_area_counts_pairs(pairs: list[tuple[int, bool]]) -> None:
    score, label = np.array([p[0] for p in pairs], dtype=float), np.array([p[1] for p in pairs])
    yes, no = score[label], score[~label]
    found = area_under_curve(score, label)
    if not len(yes) or not len(no):
        assert found is None
    else:
        wins = sum((y > n) + 0.5 * (y == n) for y in yes for n in no)
        assert found == pytest.approx(wins / (len(yes) * len(no)))


@pytest.mark.parametrize(
    ("confidence", "survived", "known", "words"),
    [
        (np.ones(3), np.ones(3), np.ones(3), "needed are"),
        (np.full((2, 2), 1.5), np.zeros(2), np.zeros(2), "must lie in 0 to 1"),
        (np.ones((2, 2)), np.array([2, 0]), np.array([1, 0]), "must hold in every round"),
        (np.ones((2, 2)), np.array([0, 0]), np.array([3, 0]), "must hold in every round"),
    ],
)
def test_bad_observations(confidence: np.ndarray, survived: np.ndarray, known: np.ndarray, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Observations(confidence, survived.astype(np.int64), known.astype(np.int64))


def test_bad_settings() -> None:
    observed = simulate((1.0,), num=5)
    with pytest.raises(ValueError, match="must hold temperatures above 0"):
        fit(observed, grid=[])
    with pytest.raises(ValueError, match="no rounds to fit on"):
        fit(Observations(np.zeros((0, 2)), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)))
    with pytest.raises(ValueError, match="must be numbers above 0"):
        Calibration((1.0, 0.0))
