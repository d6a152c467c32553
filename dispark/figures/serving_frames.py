"""The data behind figures of serving: one row an arm and load, from finished runs of dispark serve and simulate.

Columns as in frames.py; `sampling` says whether a panel was measured or simulated, `x` is the number of users or, for
a Pareto curve, tokens/s of one. It knows nothing about drawing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from dispark.runs.store import StoredRun, load

KINDS = ("serve", "simulate")


def load_serving(paths: Sequence[str]) -> list[StoredRun]:
    """Finished runs of serving in some folders.

    Raises:
        ValueError: a folder that isn't there, or none that holds such a run.
    """
    found = [run for path in paths for run in load(Path(path)) if run.run.get("kind") in KINDS]
    if not found:
        raise ValueError(f"runs={list(paths)}: no finished run of dispark serve or simulate in there")
    return found


def load_frame(runs: Sequence[StoredRun]) -> pd.DataFrame:
    """Throughput in tokens/s (value) and drafts verified for a request in a round (verify_budget) by users (x)."""
    return _frame(runs, "num_rows")


def pareto_frame(runs: Sequence[StoredRun]) -> pd.DataFrame:
    """Throughput in tokens/s (value) by the median user's tokens/s (x), with the number of users beside it."""
    return _frame(runs, "tokens_per_s_p50")


def _frame(runs: Sequence[StoredRun], x: str) -> pd.DataFrame:
    rows: list[dict[str, Any]] = []
    for run in runs:
        content = run.run
        for arm, figures in content["arms"].items():
            at = content["num_rows"] if x == "num_rows" else figures[x]
            if at is None:
                continue
            low, high = figures["throughput_ci"] or (None, None)
            rows.append(
                {
                    "target": _target(content),
                    "sampling": "simulated" if content["kind"] == "simulate" else "measured",
                    "task": str(content.get("task") or "load"),
                    "series": arm,
                    "x": at,
                    "value": figures["throughput_tokens_per_s"],
                    "low": low,
                    "high": high,
                    "users": content["num_rows"],
                    "verify_budget": figures["verify_budget"],
                    "mean_draft_length": figures["mean_draft_length"],
                    "num_rounds": None,
                    "num_prompts": content["num_requests"],
                    "run": str(run.path),
                }
            )
    frame = pd.DataFrame(rows)
    place = ["target", "sampling", "task", "series", "users"]
    if frame.duplicated(place).any():
        twins = frame[frame.duplicated(place, keep=False)]
        first = twins.iloc[0]
        what = f"{first['series']} with {first['users']} users on {first['task']}"
        raise ValueError(f"runs: several runs hold {what}; give one of them")
    return frame.sort_values(place, ignore_index=True)


def _target(run: Mapping[str, Any]) -> str:
    """The target, or for a simulation its engine in a word."""
    if run["kind"] == "serve":
        return str(run["target"])
    chosen = run["choices"]
    parts = [chosen.get("network@engine.network"), chosen.get("hardware@engine.hardware")]
    return " on ".join(part for part in parts if part) or str(chosen.get("engine", "engine"))
