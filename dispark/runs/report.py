"""Shows a comparison to people: settings that all rows share in one line, then the table, then the notes.

It takes the frame that `compare` makes and adds no figure of its own. CSV is that frame as it is, at full precision.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from dispark.runs.table import Formats, format_cell, is_missing, to_csv, to_markdown, to_text

FORMATS = ("text", "csv", "markdown")
_SHARED = ("target", "dtype", "device", "scheduler", "verifier", "sampling", "batch_size", "max_new_tokens")
_GIB = 2**30
_NOT_DISTINGUISHABLE = "n.d."


def render(frame: pd.DataFrame, form: str = "text") -> str:
    """The comparison as text for a terminal, CSV or Markdown, ending in a line break.

    Raises:
        ValueError: the format is unknown.
    """
    if form not in FORMATS:
        raise ValueError(f"format={form}: must be one of {', '.join(FORMATS)}")
    if form == "csv":
        return to_csv(_flat(frame))
    shown, notes = _shown(frame)
    formats: Formats = {"tok/s": ".1f"}
    shared = ", ".join(f"{key} {frame[key].iloc[0]}" for key in _SHARED if _is_shared(frame, key))
    if form == "markdown":
        parts = [shared, to_markdown(shown, formats), "\n".join(f"- {note}" for note in notes)]
        return "\n\n".join(part for part in parts if part) + "\n"
    return "\n".join(part for part in (shared, to_text(shown, formats), *notes) if part) + "\n"


def _flat(frame: pd.DataFrame) -> pd.DataFrame:
    """Each interval as two columns, so that every CSV field is one value."""
    columns: dict[str, list[Any]] = {}
    for name in frame.columns:
        if str(name).endswith("_ci"):
            stem = str(name).removesuffix("_ci")
            columns[f"{stem}_low"] = [None if is_missing(ends) else ends[0] for ends in frame[name]]
            columns[f"{stem}_high"] = [None if is_missing(ends) else ends[1] for ends in frame[name]]
        else:
            columns[str(name)] = list(frame[name])
    return pd.DataFrame(columns, dtype=object)


def _shown(frame: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """The columns for people, and the notes below them."""
    rows = frame.to_dict("records")
    notes: list[str] = []
    columns: dict[str, list[Any]] = {}
    for key in ("target", "dtype", "task", "drafter", "scheduler", "verifier", "sampling", "batch_size"):
        if key in ("task", "drafter") or not _is_shared(frame, key):
            columns["rows" if key == "batch_size" else key] = [format_cell(row.get(key)) for row in rows]
    if any(row.get("has_random_weights") for row in rows):
        columns["drafter"] = [
            f"{cell} (random)" if row.get("has_random_weights") else cell
            for row, cell in zip(rows, columns["drafter"], strict=True)
        ]
        notes.append(
            "(random): RANDOM WEIGHTS, for speed only: acceptance, MATL and speed-up say nothing of the method"
        )
    if any(row.get("settings") for row in rows):
        columns["settings"] = [format_cell(row.get("settings") or None) for row in rows]
    columns["MATL"] = [_with_interval(row, "matl") for row in rows]
    columns["tok/s"] = [row["throughput_tokens_per_s"] for row in rows]
    columns["speed-up"] = [_ratio(row, "speedup") for row in rows]
    columns["vs generate"] = [_ratio(row, "speedup_vs_generate") for row in rows]
    reasons = _reasons(rows)
    columns["J/token"] = [
        format_cell(row["joules_per_token"], ".3g", f"- {reasons.get(row['energy_reason'], '')}".rstrip())
        for row in rows
    ]
    columns["lossless"] = [format_cell(row["losslessness"]) for row in rows]
    columns["degenerate"] = [format_cell(row["degenerate_share"], ".0%") for row in rows]
    columns["peak memory"] = [_memory(row) for row in rows]
    for key, title in (("speedup_ratio", "speed-up"), ("throughput_ratio", "tok/s"), ("matl_ratio", "MATL")):
        if key in frame.columns:
            columns[f"{title} / baseline"] = [_ratio(row, key) for row in rows]
    optional = ("vs generate", "lossless", "degenerate", "peak memory")
    columns = {k: cells for k, cells in columns.items() if k not in optional or set(cells) != {"-"}}
    if any(str(cell).endswith(_NOT_DISTINGUISHABLE) for cells in columns.values() for cell in cells):
        notes.append(f"{_NOT_DISTINGUISHABLE}: not distinguishable from 1, which lies in the 95 % interval")
    notes += [f"{mark} no J/token: {reason}" for reason, mark in reasons.items()]
    if "baseline" in frame.columns:
        names = sorted({str(row["baseline"]) for row in rows if not is_missing(row["baseline"])})
        notes.append(
            f"/ baseline: against the run of {', '.join(names) or 'nothing'}, paired by prompt; tok/s of two runs "
            "also differ by the state of the machine, speed-ups hardly"
        )
    return pd.DataFrame(columns, dtype=object), notes + list(frame.attrs.get("notes", ()))


def _is_shared(frame: pd.DataFrame, key: str) -> bool:
    """Whether all runs have the same known value; macro rows don't count."""
    if key not in frame.columns:
        return False
    values = [value for value, is_macro in zip(frame[key], frame["is_macro"], strict=True) if not is_macro]
    return bool(values) and not is_missing(values[0]) and all(value == values[0] for value in values)


def _reasons(rows: list[dict[Any, Any]]) -> dict[str, str]:
    """A mark for each reason why joules are missing, in the order of the rows."""
    found = dict.fromkeys(
        row["energy_reason"]
        for row in rows
        if is_missing(row["joules_per_token"]) and not is_missing(row["energy_reason"])
    )
    return {reason: f"({chr(ord('a') + i)})" for i, reason in enumerate(found)}


def _with_interval(row: dict[Any, Any], key: str, unit: str = "") -> str:
    if is_missing(row.get(key)):
        return format_cell(None)
    ends = row.get(f"{key}_ci")
    interval = "" if ends is None or is_missing(ends) else f" [{ends[0]:.2f}, {ends[1]:.2f}]"
    return f"{row[key]:.2f}{unit}{interval}"


def _ratio(row: dict[Any, Any], key: str) -> str:
    text = _with_interval(row, key, unit="x")
    return f"{text} {_NOT_DISTINGUISHABLE}" if row.get(f"is_{key}_distinguishable") is False else text


def _memory(row: dict[Any, Any]) -> str:
    if is_missing(row["peak_memory_bytes"]):
        return format_cell(None)
    return f"{row['peak_memory_bytes'] / _GIB:.2f} GiB {row['memory_scope']}"
