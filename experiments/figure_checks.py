"""What the checks of figures share: they read a figure's data, compare lines by their intervals, and print rows.

A point is above another where its 95 % interval lies above the other's; what the intervals don't settle is open.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from dispark.runs.table import to_text

COLUMNS = frozenset({"target", "sampling", "task", "series", "x", "value", "low", "high", "num_rounds"})
PANEL = ["target", "sampling", "task"]

Check = Callable[[pd.DataFrame, pd.DataFrame], list[dict[str, Any]]]


def drafter_of(series: Any) -> str:
    """The drafter that a line is about; settings may follow its name."""
    return str(series).split(" ")[0]


def verdict(point: Any, other: Any) -> str:
    """above, below or open: the first point's interval against the second's; both map low and high to its ends."""
    ends = [point["low"], point["high"], other["low"], other["high"]]
    if any(pd.isna(end) for end in ends):
        return "open"
    if point["low"] > other["high"]:
        return "above"
    return "below" if point["high"] < other["low"] else "open"


def run_check(doc: str | None, paper: Path, check: Check, formats: Mapping[str, str]) -> int:
    """The command of a check: its one argument is a figure's CSV.

    Args:
        doc: the script's docstring; its first line is the description.
        paper: published values, the check's second argument.
        check: makes rows of a figure's frame.
        formats: of the rows' columns.

    Returns:
        0, or 2 where the file can't be used, which one line on stderr says.
    """
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("data", type=Path)
    words = parser.parse_args()
    try:
        frame = pd.read_csv(words.data)
        if not set(frame.columns) >= COLUMNS:
            raise ValueError(f"lacks the columns {', '.join(sorted(COLUMNS - set(frame.columns)))}")
        rows = check(frame, pd.read_csv(paper))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        print(f"check: error: {words.data}: {reason}", file=sys.stderr)
        return 2
    _print(rows, formats)
    return 0


def _print(rows: Sequence[dict[str, Any]], formats: Mapping[str, str]) -> None:
    table = pd.DataFrame(rows, dtype=object)
    print(to_text(table, {key: form for key, form in formats.items() if key in table.columns}))
    print(json.dumps({"rows": rows}))
