"""Holds our MATL by depth against the claim of Figure 3.

    python experiments/fig3_depth/check.py results/figures/depth.csv

Reads what `dispark figures figure=depth` wrote. Prints a line for each point, and one JSON object last.
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
    """One row a target, sampling, task, series and depth; each is set against DFlash at every depth."""
    rows = []
    for place, panel in frame.sort_values("x").groupby(PANEL):
        others = panel[panel["series"].map(drafter_of) == "dflash"].to_dict("records")
        for point in panel.sort_values(["series", "x"]).to_dict("records"):
            drafter = drafter_of(point["series"])
            claims = paper[(paper["drafter"] == drafter) & (paper["layers"] == point["x"])]
            row = dict(zip(PANEL, place, strict=True))
            row |= {"drafter": point["series"], "layers": point["x"], "matl": point["value"]}
            against = [f"{other['x']}: {verdict(point, other)}" for other in others if drafter != "dflash"]
            row["against dflash of n layers"] = ", ".join(against) or None
            said = [f"{claim.other_layers}: {claim.verdict}" for claim in claims.itertuples()]
            rows.append(row | {"paper": ", ".join(said) or None})
    return rows


def main() -> int:
    return run_check(__doc__, PAPER, check, {"matl": ".3f"})


if __name__ == "__main__":
    sys.exit(main())
