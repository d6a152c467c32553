"""Holds our conditional acceptance by position against the claims of Figure 2.

    python experiments/fig2_acceptance/check.py results/figures/acceptance.csv

Reads what `dispark figures figure=acceptance` wrote. Prints a line for each claim and task, and one JSON object last.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd

from dispark.figures.panels import MIN_ROUNDS
from dispark.runs.table import to_text

PAPER = Path(__file__).with_name("paper.csv")
COLUMNS = {"target", "sampling", "task", "series", "x", "value", "low", "high", "num_rounds"}


def trend(line: pd.DataFrame) -> str:
    """falls, rises or open: the last position's interval against the first's."""
    first, last = line.iloc[0], line.iloc[-1]
    if len(line) < 2 or line[["low", "high"]].isna().any(axis=None):
        return "open"
    if last["high"] < first["low"]:
        return "falls"
    return "rises" if last["low"] > first["high"] else "open"


def ahead(line: pd.DataFrame, other: pd.DataFrame) -> str:
    """Positions at which one line's interval lies above another's, below it, and neither, as "above/below/open"."""
    both = line.merge(other, on="x", suffixes=("", "_other"))
    above = int((both["low"] > both["high_other"]).sum())
    below = int((both["high"] < both["low_other"]).sum())
    return f"{above}/{below}/{len(both) - above - below}"


def check(frame: pd.DataFrame, paper: pd.DataFrame) -> list[dict[str, Any]]:
    """One row a target, sampling, task and series.

    Raises:
        ValueError: the frame isn't that of the figure.
    """
    if not set(frame.columns) >= COLUMNS:
        raise ValueError(f"lacks the columns {', '.join(sorted(COLUMNS - set(frame.columns)))}")
    frame = frame[frame["num_rounds"] >= MIN_ROUNDS].sort_values("x")
    rows = []
    for (target, sampling, task), panel in frame.groupby(["target", "sampling", "task"]):
        for series, line in panel.groupby("series"):
            drafter = str(series).split(" ")[0]
            published = paper[(paper["drafter"] == drafter) & (paper["task"] == task)].sort_values("position")
            dflash = panel[panel["series"] == "dflash"]
            rows.append(
                {
                    "target": target,
                    "sampling": sampling,
                    "task": task,
                    "drafter": series,
                    "first": line.iloc[0]["value"],
                    "last": line.iloc[-1]["value"],
                    "positions": len(line),
                    "trend": trend(line),
                    "above/below/open against dflash": ahead(line, dflash)
                    if len(dflash) and series != "dflash"
                    else None,
                    "paper": ", ".join(f"{row.value} at {row.position}" for row in published.itertuples()) or None,
                }
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path)
    words = parser.parse_args()
    try:
        rows = check(pd.read_csv(words.data), pd.read_csv(PAPER))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        print(f"check: error: {words.data}: {reason}", file=sys.stderr)
        return 2
    print(to_text(pd.DataFrame(rows), {"first": ".3f", "last": ".3f"}))
    print(json.dumps({"rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
