"""Holds our calibration against the claims of Figure 6, and draws the reliability diagrams.

    python experiments/fig6_calibration/check.py results/figures/calibration_t1.json

Reads what `dispark calibrate report=FILE` wrote. Prints a line for each kind of confidence, and one JSON object last; a
figure lies beside each file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from dispark.figures.panels import reliability_figure
from dispark.runs.table import to_text

PAPER = Path(__file__).with_name("paper.csv")


def check(report: Mapping[str, Any], paper: pd.DataFrame) -> list[dict[str, Any]]:
    """One row a kind of confidence: means over positions, and whether any AUC moved out of its interval."""
    rows = []
    frame = pd.DataFrame(report["positions"])
    for kind, lines in frame.groupby("confidence", sort=False):
        before, after = ([cell["value"] for cell in lines[f"ece_{when}"]] for when in ("before", "after"))
        aucs = [
            (first, second)
            for first, second in zip(lines["auc_before"], lines["auc_after"], strict=True)
            if first["value"] is not None and first["low"] is not None
        ]
        rows.append(
            {
                "temperature of sampling": report["sampling"]["temperature"],
                "confidence": kind,
                "positions": len(lines),
                "mean ECE before": sum(before) / len(before),
                "after": sum(after) / len(after),
                "most after": max(after),
                "AUC": f"{aucs[0][0]['value']:.3f} to {aucs[-1][0]['value']:.3f}" if aucs else None,
                "AUC stays": all(a["low"] <= b["value"] <= a["high"] for a, b in aucs),
                "paper before": float(paper["ece_before"].mean()),
                "paper after": float(paper["ece_after"].mean()),
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("reports", type=Path, nargs="+")
    rows: list[dict[str, Any]] = []
    for path in parser.parse_args().reports:
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
            rows += check(report, pd.read_csv(PAPER))
            reliability_figure(report["reliability"]).savefig(path.with_suffix(".png"), dpi=150)
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(f"check: error: {path}: is no report of dispark calibrate ({error})", file=sys.stderr)
            return 2
    shares = ("mean ECE before", "after", "most after", "paper before", "paper after")
    print(to_text(pd.DataFrame(rows, dtype=object), dict.fromkeys(shares, ".1%")))
    print(json.dumps({"rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
