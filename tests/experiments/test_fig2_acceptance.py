"""What the check of Figure 2 makes of lines that fall, rise, or say nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))

from experiments.lines import frame, line
from fig2_acceptance import check


def positions(*values: float) -> dict[int, float]:
    return dict(enumerate(values, start=1))


def rows(*lines: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["drafter"]: row for row in check.check(frame(*lines), pd.read_csv(check.PAPER))}


def test_trends_go_by_intervals() -> None:
    found = rows(
        line("dflash", positions(0.8, 0.7, 0.6)),
        line("dispark", positions(0.8, 0.81, 0.79)),
        line("eagle3", positions(0.5, 0.6, 0.7)),
        line("wide", positions(0.8, 0.7, 0.6), width=0.2),
    )
    assert {name: row["trend"] for name, row in found.items()} == {
        "dflash": "falls",
        "dispark": "open",
        "eagle3": "rises",
        "wide": "open",
    }
    assert found["dispark"]["above/below/open against dflash"] == "2/0/1"
    assert found["eagle3"]["above/below/open against dflash"] == "1/2/0"
    assert found["dflash"]["above/below/open against dflash"] is None
    assert found["dispark"]["paper"] == "0.93 at 1"


def test_a_single_position_has_no_trend() -> None:
    assert rows(line("dispark", {1: 0.8}))["dispark"]["trend"] == "open"


def test_positions_that_few_rounds_reached_do_not_count() -> None:
    few = line("dispark", {4: 0.9}, rounds=3)
    assert rows([*line("dispark", positions(0.8, 0.8, 0.8)), *few])["dispark"]["positions"] == 3
