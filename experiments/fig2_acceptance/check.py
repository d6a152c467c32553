"""Holds our conditional acceptance by position against the claims of Figure 2.

    python experiments/fig2_acceptance/check.py results/figures/acceptance.csv

Reads what `dispark figures figure=acceptance` wrote. Prints a line for each claim and task, and one JSON object last.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from figure_checks import PANEL, drafter_of, run_check, verdict

from dispark.figures.panels import MIN_ROUNDS

PAPER = Path(__file__).with_name("paper.csv")


def trend(line: pd.DataFrame) -> str:
    """falls, rises or open: the last position's interval against the first's."""
    found = verdict(line.iloc[-1], line.iloc[0])
    return {"above": "rises", "below": "falls"}.get(found, found)


def ahead(line: pd.DataFrame, other: pd.DataFrame) -> str:
    """Positions at which one line's interval lies above another's, below it, and neither, as "above/below/open"."""
    others = {point["x"]: point for point in other.to_dict("records")}
    points = line.to_dict("records")
    counts = Counter(verdict(point, others[point["x"]]) for point in points if point["x"] in others)
    return "/".join(str(counts[key]) for key in ("above", "below", "open"))


def check(frame: pd.DataFrame, paper: pd.DataFrame) -> list[dict[str, Any]]:
    """One row a target, sampling, task and series."""
    frame = frame[frame["num_rounds"] >= MIN_ROUNDS].sort_values("x")
    rows = []
    for place, panel in frame.groupby(PANEL):
        dflash = panel[panel["series"] == "dflash"]
        for series, line in panel.groupby("series"):
            is_published = (paper["drafter"] == drafter_of(series)) & (paper["task"] == place[2])
            published = paper[is_published].sort_values("position")
            row = dict(zip(PANEL, place, strict=True)) | {"drafter": series}
            row |= {"first": line.iloc[0]["value"], "last": line.iloc[-1]["value"], "positions": len(line)}
            row["trend"] = trend(line)
            is_other = len(dflash) > 0 and series != "dflash"
            row["above/below/open against dflash"] = ahead(line, dflash) if is_other else None
            row["paper"] = ", ".join(f"{point.value} at {point.position}" for point in published.itertuples()) or None
            rows.append(row)
    return rows


def main() -> int:
    return run_check(__doc__, PAPER, check, {"first": ".3f", "last": ".3f"})


if __name__ == "__main__":
    sys.exit(main())
