"""The check of Figure 5: rates at both ends beside the paper's."""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))

from experiments.lines import frame, line
from fig5_threshold import check


def test_rates_and_what_is_left() -> None:
    lines = frame(line("dispark", {0.0: 2.0, 0.4: 1.8, 0.8: 1.5}))
    lines = lines.assign(rejected=[2.0, 0.8, 0.1], acceptance_rate=[0.5, 0.7, 0.94])
    (row,) = check.check(lines, pd.read_csv(check.PAPER))
    assert row["thresholds"] == "0 to 0.8"
    assert row["rises"]
    assert row["accepted kept"] == pytest.approx(0.75)
    assert row["rejected kept"] == pytest.approx(0.05)
    assert (row["paper at first"], row["paper at last"]) == (0.769, 0.925)
    falling = lines.assign(acceptance_rate=[0.5, 0.4, 0.9])
    assert not check.check(falling, pd.read_csv(check.PAPER))[0]["rises"]


def test_what_cannot_be_checked() -> None:
    with pytest.raises(ValueError, match="lacks the columns rejected"):
        check.check(frame(line("dispark", {0.0: 1.0})), pd.read_csv(check.PAPER))
    one = frame(line("dispark", {0.0: 1.0})).assign(rejected=1.0, acceptance_rate=0.5)
    with pytest.raises(ValueError, match="no line has two thresholds"):
        check.check(one, pd.read_csv(check.PAPER))
