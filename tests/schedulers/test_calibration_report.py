"""The report's figures on promises whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest

from dispark.schedulers.calibration import Calibration, Observations, area_under_curve, brier_score
from dispark.schedulers.calibration_report import Rounds, diagrams, report


def drawn(num: int = 4000, sharpness: float = 1.0, seed: int = 0) -> Rounds:
    """Rounds of two positions whose drafts survive as often as a promise of sharpness 1 says."""
    generator = np.random.default_rng(seed)
    true_NG = generator.uniform(0.05, 0.95, (num, 2))
    comes_NG = generator.uniform(size=(num, 2)) < true_NG
    survived_N = np.cumprod(comes_NG, axis=1).sum(axis=1)
    logit_NG = np.log(true_NG / (1 - true_NG)) * sharpness
    promised_NG = 1 / (1 + np.exp(-logit_NG))
    return Rounds(Observations(promised_NG, survived_N, np.full(num, 2)), np.arange(num) % 40)


def test_promises_that_are_too_sharp_are_mended() -> None:
    lines = report(drawn(sharpness=2.0), Calibration((2.0,)), num_bins=15)
    assert [line["position"] for line in lines] == [1, 2]
    for line in lines:
        assert line["ece_before"].value > 0.06
        assert line["ece_after"].value < 0.03
        assert line["brier_after"].value < line["brier_before"].value
        assert line["temperature"] == 2.0
        for name in ("ece", "auc", "brier"):
            estimate = line[f"{name}_after"]
            assert estimate.low < estimate.high
    first = lines[0]  # one position's order is what it was
    assert first["auc_after"].value == pytest.approx(first["auc_before"].value, abs=1e-12)
    assert first["auc_before"].low < first["auc_before"].value < first["auc_before"].high


def test_values_are_those_of_the_plain_measures() -> None:
    found = drawn(num=300)
    line = report(found, Calibration((1.0,)), num_bins=10)[1]
    o = found.observed
    both_N, label_N = o.confidence_NG.prod(axis=1), o.survives[:, 1]
    assert line["auc_before"].value == area_under_curve(both_N, label_N)
    assert line["brier_before"].value == pytest.approx(brier_score(both_N, label_N), abs=1e-12)
    assert line["survives"] == label_N.mean()


def test_unknown_positions_are_left_out() -> None:
    observed = Observations(np.full((3, 2), 0.5), np.array([1, 0, 1]), np.array([1, 1, 1]))
    rounds = Rounds(observed, np.arange(3))
    assert [line["position"] for line in report(rounds, Calibration((1.0,)), num_bins=5)] == [1]
    assert [one["position"] for one in diagrams(observed, Calibration((1.0,)), 5)] == [1]


def test_a_position_where_everything_survives_has_no_area() -> None:
    observed = Observations(np.full((4, 1), 0.9), np.ones(4, dtype=np.int64), np.ones(4, dtype=np.int64))
    line = report(Rounds(observed, np.arange(4)), Calibration((1.0,)), num_bins=5)[0]
    assert line["auc_before"].value is None
    assert line["ece_before"].value == pytest.approx(0.1)
