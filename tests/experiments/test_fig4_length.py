"""The check of Figure 4: gains over DFlash at the same length, in tokens and in time."""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))

from experiments.lines import frame, line
from fig4_length import check


def test_gains_are_against_dflash_at_the_same_length() -> None:
    lines = frame(
        line("dispark", {3: 2.0, 7: 2.4}, round_s=0.102),
        line("dispark_rnn", {7: 2.02, 15: 2.5}, round_s=0.1),
        line("dflash", {3: 2.0, 7: 2.0}, round_s=0.1),
    )
    found = {(row["drafter"], row["drafted"]): row for row in check.check(lines, pd.read_csv(check.PAPER))}
    assert set(found) == {("dispark", 3), ("dispark", 7), ("dispark_rnn", 7)}
    row = found["dispark", 7]
    assert row["gain"] == pytest.approx(0.2)
    assert row["more time a round"] == pytest.approx(0.02)
    assert row["against dflash"] == "above"
    assert row["paper's gain"] == 0.16
    assert found["dispark", 3]["against dflash"] == "open"
    assert found["dispark", 3]["paper's gain"] is None


def test_a_frame_without_dflash_or_without_times_is_refused() -> None:
    paper = pd.read_csv(check.PAPER)
    with pytest.raises(ValueError, match="DFlash has no point"):
        check.check(frame(line("dispark", {3: 2.0}, round_s=0.1)), paper)
    with pytest.raises(ValueError, match="lacks the column round_s"):
        check.check(frame(line("dispark", {3: 2.0})), paper)
