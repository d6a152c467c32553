"""Frames as `dispark figures` writes them, from plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd


def line(
    series: str, values: Mapping[int, float], width: float = 0.02, rounds: int = 100, **more: Any
) -> list[dict[str, Any]]:
    """A line's points, value by x, each with an interval of +-width."""
    place = {"target": "toy", "sampling": "t1", "task": "math", "series": series, "num_rounds": rounds}
    return [
        place | {"x": x, "value": value, "low": value - width, "high": value + width} | more
        for x, value in values.items()
    ]


def frame(*lines: list[dict[str, Any]]) -> pd.DataFrame:
    return pd.DataFrame([point for each in lines for point in each])
