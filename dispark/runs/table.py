"""Writes a DataFrame as an aligned text table, as Markdown or as CSV, with one format a column and no dependency.

A missing value is "-" for people and an empty field in CSV, where a dash would turn a column of numbers into text. It
knows nothing about what the columns mean.
"""

from __future__ import annotations

import csv
import io
import math
import unicodedata
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import pandas as pd

Format = str | Callable[[Any], str]
Formats = Mapping[str, Format]
MISSING = "-"


def is_missing(value: Any) -> bool:
    """None, NaN, NaT or pandas' NA; a container is never missing."""
    return value is None or value is pd.NA or value is pd.NaT or (isinstance(value, float) and math.isnan(value))


def format_cell(value: Any, form: Format | None = None, missing: str = MISSING) -> str:
    """One value as text.

    Args:
        value: anything.
        form: a format specification such as ".2f", or a function from value to text; None is str().
        missing: what stands for a missing value.
    """
    if is_missing(value):
        return missing
    if callable(form):
        return form(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if form and isinstance(value, Real):
        return format(value, form)
    return str(value)


def to_text(frame: pd.DataFrame, formats: Formats | None = None) -> str:
    """Columns two blanks apart under a ruled header, numbers to the right and text to the left; no final line break."""
    cells = _cells(frame, formats)
    if not cells:
        return ""
    widths = [max(_width(row[i]) for row in cells) for i in range(len(frame.columns))]
    is_right = _numeric(frame, formats)
    lines = ["  ".join(map(_pad, row, widths, is_right)).rstrip() for row in cells]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def to_markdown(frame: pd.DataFrame, formats: Formats | None = None) -> str:
    """A GitHub-style table; bars and line breaks in cells are escaped. No line break at the end."""
    cells = _cells(frame, formats)
    if not cells:
        return ""
    rule = ["---:" if right else "---" for right in _numeric(frame, formats)]
    rows = [[cell.replace("|", "\\|").replace("\n", "<br>") for cell in row] for row in cells]
    return "\n".join(f"| {' | '.join(row)} |" for row in (rows[0], rule, *rows[1:]))


def to_csv(frame: pd.DataFrame, formats: Formats | None = None) -> str:
    """RFC 4180 with "\\n" line ends; without formats numbers keep their full precision."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(_cells(frame, formats, missing=""))
    return buffer.getvalue()


def _cells(frame: pd.DataFrame, formats: Formats | None, missing: str = MISSING) -> list[list[str]]:
    """Header and body as text; empty for a frame without columns."""
    formats = formats or {}
    unknown = set(formats) - set(map(str, frame.columns))
    assert not unknown, f"formats for columns that are not there: {sorted(unknown)}"
    if not len(frame.columns):
        return []
    columns = [
        [format_cell(value, formats.get(str(name)), missing) for value in frame.iloc[:, i].astype(object)]
        for i, name in enumerate(frame.columns)
    ]
    return [[str(name) for name in frame.columns], *map(list, zip(*columns, strict=True))]


def _numeric(frame: pd.DataFrame, formats: Formats | None) -> list[bool]:
    """Per column whether all that is there is a number, or a format for numbers was given."""
    formats = formats or {}
    result = []
    for i, name in enumerate(frame.columns):
        known = [value for value in frame.iloc[:, i].astype(object) if not is_missing(value)]
        is_number = bool(known) and all(isinstance(value, Real) and not isinstance(value, bool) for value in known)
        result.append(is_number or isinstance(formats.get(str(name)), str))
    return result


def _width(text: str) -> int:
    """Columns on a terminal: wide characters take two, combining marks none."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _pad(text: str, width: int, is_right: bool) -> str:
    blanks = " " * (width - _width(text))
    return blanks + text if is_right else text + blanks
