"""Holds our accepted and rejected drafts by confidence threshold against the claims of Figure 5.

    python experiments/fig5_threshold/check.py results/figures/threshold.csv

Reads what `dispark figures figure=threshold` wrote. Prints a line for each task and drafter, and one JSON object last.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from figure_checks import PANEL, run_check

PAPER = Path(__file__).with_name("paper.csv")


def check(frame: pd.DataFrame, paper: pd.DataFrame) -> list[dict[str, Any]]:
    """One row a target, sampling, task and series.

    Raises:
        ValueError: the frame has no rates, or no line has two thresholds.
    """
    if not {"rejected", "acceptance_rate"} <= set(frame.columns):
        raise ValueError("lacks the columns rejected and acceptance_rate")
    rows = []
    for place, line in frame.sort_values("x").groupby([*PANEL, "series"]):
        if len(line) < 2:
            continue
        first, last = line.iloc[0], line.iloc[-1]
        row = dict(zip([*PANEL, "drafter"], place, strict=True))
        row |= {"thresholds": f"{first['x']:g} to {last['x']:g}"}
        row |= {"rate at first": first["acceptance_rate"], "rate at last": last["acceptance_rate"]}
        row["rises"] = bool(line["acceptance_rate"].is_monotonic_increasing)
        row["accepted kept"] = last["value"] / first["value"] if first["value"] else None
        row["rejected kept"] = last["rejected"] / first["rejected"] if first["rejected"] else None
        for name, point in (("paper at first", first), ("paper at last", last)):
            is_it = (paper["task"] == place[2]) & (paper["threshold"] == point["x"])
            rates = paper[is_it]["acceptance_rate"].tolist()
            row[name] = rates[0] if rates else None
        rows.append(row)
    if not rows:
        raise ValueError("no line has two thresholds or more")
    return rows


def main() -> int:
    share = dict.fromkeys(("rate at first", "rate at last", "paper at first", "paper at last"), ".3f")
    return run_check(__doc__, PAPER, check, {**share, "accepted kept": ".0%", "rejected kept": ".0%"})


if __name__ == "__main__":
    sys.exit(main())
