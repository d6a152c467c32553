"""How much faster a user is than with MTP-1 at the same throughput, against the claims of Figure 7.

    python experiments/fig7_pareto/check.py results/figures/pareto.csv

Reads what `dispark figures figure=pareto` wrote. Prints a line for each arm, and one JSON object last.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from figure_checks import PANEL, run_check

PAPER = Path(__file__).with_name("paper.csv")
BASELINE = "mtp_1"


def gains(line: pd.DataFrame, base: pd.DataFrame) -> list[float]:
    """Of one user's speed over the baseline's, at each throughput of the baseline that the arm reaches as well."""
    ours, theirs = line.sort_values("value"), base.sort_values("value")
    low, high = ours["value"].min(), ours["value"].max()
    within = theirs[(theirs["value"] >= low) & (theirs["value"] <= high)]
    speeds = np.interp(within["value"], ours["value"], ours["x"])
    return [float(speed / other - 1) for speed, other in zip(speeds, within["x"], strict=True)]


def check(frame: pd.DataFrame, paper: pd.DataFrame) -> list[dict[str, Any]]:
    """One row a panel and arm.

    Raises:
        ValueError: no panel has the baseline beside another arm.
    """
    rows = []
    for place, panel in frame.groupby(PANEL):
        base = panel[panel["series"] == BASELINE]
        if base.empty:
            continue
        published = paper[paper["target"].map(lambda name, there=place[0]: name in there)]
        for series, line in panel[panel["series"] != BASELINE].groupby("series"):
            found = gains(line, base)
            row = dict(zip(PANEL, place, strict=True)) | {"arm": series, "matched points": len(found)}
            row |= {"least gain": min(found, default=None), "most gain": max(found, default=None)}
            row |= {"most throughput": float(line["value"].max() / base["value"].max() - 1)}
            is_known = len(published) > 0
            row["paper"] = f"{published['low'].iloc[0]:.0%} to {published['high'].iloc[0]:.0%}" if is_known else None
            rows.append(row)
    if not rows:
        raise ValueError(f"no panel has {BASELINE} beside another arm")
    return rows


def main() -> int:
    return run_check(__doc__, PAPER, check, {"least gain": "+.0%", "most gain": "+.0%", "most throughput": "+.0%"})


if __name__ == "__main__":
    sys.exit(main())
