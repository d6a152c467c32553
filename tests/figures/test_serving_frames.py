"""Frames of serving runs, measured and simulated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from runs.toolbox import write_run

from dispark.figures.serving_frames import load_frame, load_serving, pareto_frame
from dispark.runs.loaded import load_runs
from dispark.runs.store import RunStore


def write_serving(root: Path, users: int, kind: str = "serve", key: str = "", **changes: Any) -> None:
    """A finished run of two arms whose throughput grows with the users and whose users grow slower."""
    arms = {
        name: {
            "throughput_tokens_per_s": factor * users,
            "throughput_ci": [factor * users - 1, factor * users + 1] if kind == "serve" else None,
            "tokens_per_s_p50": factor * 50 / users,
            "verify_budget": 5 / users,
            "mean_draft_length": 5.0,
        }
        for name, factor in (("none", 10.0), ("dispark", 15.0))
    }
    run = {"kind": kind, "target": "toy", "task": "all", "num_rows": users, "num_requests": 9, "arms": arms}
    if kind == "simulate":
        run |= {"task": None, "choices": {"network@engine.network": "big", "hardware@engine.hardware": "fast"}}
    store = RunStore(root, key=f"{kind}{users}{key}"[:12], slug=kind)
    store.begin({"users": users})
    store.write_run(run | changes)
    store.mark_done()


def test_load_and_pareto(tmp_path: Path) -> None:
    for users in (8, 1):
        write_serving(tmp_path, users)
        write_serving(tmp_path, users, "simulate")
    runs = load_serving([str(tmp_path)])
    frame = load_frame(runs)
    assert len(frame) == 8
    mine = frame[(frame["sampling"] == "measured") & (frame["series"] == "dispark")]
    assert mine["x"].tolist() == [1, 8]
    assert mine["value"].tolist() == [15.0, 120.0]
    assert mine["low"].tolist() == [14.0, 119.0]
    assert mine["verify_budget"].tolist() == [5.0, 0.625]
    simulated = frame[frame["sampling"] == "simulated"]
    assert set(simulated["target"]) == {"big on fast"}
    assert simulated["low"].isna().all()
    pareto = pareto_frame(runs)
    mine = pareto[(pareto["sampling"] == "measured") & (pareto["series"] == "none")]
    assert mine["x"].tolist() == [500.0, 62.5]


def test_two_runs_of_one_load_are_refused(tmp_path: Path) -> None:
    write_serving(tmp_path, 4)
    write_serving(tmp_path, 4, key="b")
    with pytest.raises(ValueError, match="several runs hold none with 4 users on all; give one of them"):
        load_frame(load_serving([str(tmp_path)]))


def test_runs_of_bench_and_of_serving_are_told_apart(tmp_path: Path) -> None:
    write_run(tmp_path, "two")
    with pytest.raises(ValueError, match="no finished run of dispark serve or simulate in there"):
        load_serving([str(tmp_path)])
    write_serving(tmp_path, 4)
    assert len(load_serving([str(tmp_path)])) == 1
    assert [run.label("drafter") for run in load_runs([tmp_path])] == ["two"]
