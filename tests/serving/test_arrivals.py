"""Plans of arrivals, and the traces that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dispark.serving.arrivals import Arrival, ClosedLoop, PoissonArrivals, TraceArrivals


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return str(path)


def test_users_who_wait_are_all_there() -> None:
    users = ClosedLoop(3)
    assert users.max_in_flight == 3
    assert users.plan(2, seed=0) == [Arrival(0.0), Arrival(0.0)]


def test_random_arrivals_have_the_rate_and_the_seed() -> None:
    plan = PoissonArrivals(rate=4.0)
    assert plan.max_in_flight is None
    times = [arrival.at_s for arrival in plan.plan(4000, seed=1)]
    gaps = np.diff([0.0, *times])
    assert times == sorted(times)
    assert gaps.mean() == pytest.approx(0.25, rel=0.05)
    assert gaps.std() == pytest.approx(0.25, rel=0.1)  # as exponential gaps have it
    assert plan.plan(4000, seed=1) == plan.plan(4000, seed=1) != plan.plan(4000, seed=2)


def test_a_trace_counts_from_its_first_and_may_be_played_faster(tmp_path: Path) -> None:
    rows = [{"at_s": 100.0}, {"at_s": 100.0, "max_new_tokens": 7}, {"at_s": 104.0}]
    trace = TraceArrivals(write(tmp_path / "t.jsonl", rows), speed=2.0)
    assert len(trace) == 3
    assert trace.plan(3, seed=0) == [Arrival(0.0), Arrival(0.0, 7), Arrival(2.0)]
    with pytest.raises(ValueError, match=r"num_requests=4: the trace has 3; must be at most so many"):
        trace.plan(4, seed=0)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "has no arrivals"),
        ([[1]], "line 1 is no object with a number at_s"),
        ([{"at_s": 1}, {"at": 2}], "line 2 is no object with a number at_s"),
        ([{"at_s": 2}, {"at_s": 1}], "line 2: at_s=1.0 lies before the line above"),
        ([{"at_s": 2, "max_new_tokens": 0}], "line 1: at_s must be finite, max_new_tokens a whole number >= 1"),
        ([{"at_s": 1e999}], "line 1: at_s must be finite"),
    ],
)
def test_bad_traces(tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TraceArrivals(write(tmp_path / "t.jsonl", rows))


def test_bad_settings(tmp_path: Path) -> None:
    for concurrency in (0, 1.5):
        with pytest.raises(ValueError, match=r"arrivals\.concurrency=.*: must be a whole number >= 1"):
            ClosedLoop(concurrency)  # type: ignore[arg-type]
    for rate in (0.0, float("inf")):
        with pytest.raises(ValueError, match=r"arrivals\.rate=.*: must be a number of requests a second above 0"):
            PoissonArrivals(rate)
    with pytest.raises(ValueError, match=r"arrivals\.speed=0"):
        TraceArrivals(str(tmp_path), speed=0)
    with pytest.raises(ValueError, match=r"arrivals\.path=.*: can't be read"):
        TraceArrivals(str(tmp_path / "none.jsonl"))
