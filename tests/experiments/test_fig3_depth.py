"""The check of Figure 3: every point against DFlash at every depth."""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))

from experiments.lines import frame, line
from fig3_depth import check


def test_each_depth_is_set_against_every_depth_of_dflash() -> None:
    lines = frame(line("dispark", {1: 1.4, 2: 1.6}), line("dflash", {1: 1.3, 2: 1.42, 5: 1.6}))
    rows = check.check(lines, pd.read_csv(check.PAPER))
    found = {(row["drafter"], row["layers"]): row for row in rows}
    assert len(found) == 5
    assert found["dispark", 1]["against dflash of n layers"] == "1: above, 2: open, 5: below"
    assert found["dispark", 2]["against dflash of n layers"] == "1: above, 2: above, 5: open"
    assert found["dflash", 5]["against dflash of n layers"] is None
    assert [found["dispark", layers]["paper"] for layers in (1, 2)] == [None, "5: above"]


def test_without_dflash_nothing_is_claimed() -> None:
    (row,) = check.check(frame(line("dispark", {2: 1.6})), pd.read_csv(check.PAPER))
    assert row["against dflash of n layers"] is None
