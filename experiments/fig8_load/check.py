"""Holds load-aware arms against fixed ones at every load, against the claims of Figure 8.

    python experiments/fig8_load/check.py results/figures/load.csv

Reads what `dispark figures figure=load` wrote. Prints a line for each load-aware arm and number of users, and one JSON
object last.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from figure_checks import PANEL, run_check

PAPER = Path(__file__).with_name("paper.csv")
AWARE = ("hardware_aware", "hardware_aware_async", "load_adaptive")
NONE = "none"
EVEN = 0.03


def word(gain: float) -> str:
    """above, even or below: by more than EVEN or not."""
    return "above" if gain > EVEN else "below" if gain < -EVEN else "even"


def check(frame: pd.DataFrame, paper: pd.DataFrame) -> list[dict[str, Any]]:
    """One row a panel, load-aware arm and number of users.

    Raises:
        ValueError: no panel has a load-aware arm beside fixed ones.
    """
    rows = []
    for place, panel in frame.groupby(PANEL):
        is_aware = panel["series"].map(lambda name: str(name).endswith(AWARE))
        fixed = panel[~is_aware]
        for series, line in panel[is_aware].groupby("series"):
            budgets = line.sort_values("x")["verify_budget"]
            for point in line.sort_values("x").to_dict("records"):
                here = fixed[fixed["x"] == point["x"]].set_index("series")["value"]
                if here.empty:
                    continue
                gain = point["value"] / here.max() - 1
                row = dict(zip(PANEL, place, strict=True)) | {"arm": series, "users": point["x"]}
                row |= {"best fixed": here.idxmax(), "gain": gain, "against it": word(gain)}
                alone = point["value"] / here[NONE] - 1 if NONE in here else None
                row |= {"gain over none": alone, "verified": point["verify_budget"]}
                rows.append(row | {"budget falls": bool(budgets.is_monotonic_decreasing)})
    if not rows:
        raise ValueError("no panel has a load-aware arm beside fixed ones")
    return rows


def main() -> int:
    return run_check(__doc__, PAPER, check, {"gain": "+.1%", "gain over none": "+.1%", "verified": ".2f"})


if __name__ == "__main__":
    sys.exit(main())
