"""Holds our MATL and time of a round by tokens drafted against the claims of Figure 4.

    python experiments/fig4_length/check.py results/figures/draft_length.csv

Reads what `dispark figures figure=draft_length` wrote. Prints a line for each point beside DFlash's,
and one JSON object last.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from figure_checks import PANEL, drafter_of, run_check, verdict

PAPER = Path(__file__).with_name("paper.csv")


def check(frame: pd.DataFrame, paper: pd.DataFrame) -> list[dict[str, Any]]:
    """One row a target, sampling, task, series and draft length at which DFlash has a point as well.

    Raises:
        ValueError: the frame has no times of rounds, or DFlash has no point beside another drafter's.
    """
    if "round_s" not in frame.columns:
        raise ValueError("lacks the column round_s")
    rows = []
    for place, panel in frame.groupby(PANEL):
        is_dflash = panel["series"].map(drafter_of) == "dflash"
        others = {point["x"]: point for point in panel[is_dflash].to_dict("records")}
        for point in panel[~is_dflash].sort_values(["series", "x"]).to_dict("records"):
            other = others.get(point["x"])
            if other is None:
                continue
            is_published = (paper["drafter"] == drafter_of(point["series"])) & (paper["task"] == place[2])
            published = paper[is_published & (paper["drafted"] == point["x"])]["gain"].tolist()
            row = dict(zip(PANEL, place, strict=True))
            row |= {"drafter": point["series"], "drafted": point["x"], "matl": point["value"]}
            row |= {"gain": point["value"] / other["value"] - 1, "against dflash": verdict(point, other)}
            row |= {"more time a round": point["round_s"] / other["round_s"] - 1}
            rows.append(row | {"paper's gain": published[0] if published else None})
    if not rows:
        raise ValueError("DFlash has no point beside another drafter's of the same length")
    return rows


def main() -> int:
    formats = {"matl": ".3f", "gain": "+.1%", "more time a round": "+.1%", "paper's gain": "+.0%"}
    return run_check(__doc__, PAPER, check, formats)


if __name__ == "__main__":
    sys.exit(main())
