"""The check of Figure 8: load-aware arms against the best fixed one at each load."""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))

from experiments.lines import frame, line
from fig8_load import check


def test_each_load_against_the_best_fixed_arm() -> None:
    lines = frame(
        line("none", {1: 40.0, 8: 200.0}, verify_budget=0.0),
        line("dispark_all", {1: 60.0, 8: 150.0}, verify_budget=5.0),
        line("dispark_hardware_aware", {1: 61.0, 8: 220.0}, verify_budget=1.0),
    )
    lines.loc[(lines["series"] == "dispark_hardware_aware") & (lines["x"] == 1), "verify_budget"] = 4.0
    rows = check.check(lines, pd.read_csv(check.PAPER))
    found = {row["users"]: row for row in rows}
    assert (found[1]["best fixed"], found[1]["against it"]) == ("dispark_all", "even")
    assert (found[8]["best fixed"], found[8]["against it"]) == ("none", "above")
    assert found[8]["gain over none"] == pytest.approx(0.1)
    assert found[1]["budget falls"]


def test_without_anything_to_compare() -> None:
    with pytest.raises(ValueError, match="no panel has a load-aware arm beside fixed ones"):
        check.check(frame(line("none", {1: 40.0})).assign(verify_budget=0.0), pd.read_csv(check.PAPER))
