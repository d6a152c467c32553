"""The data behind the figures: points, lines, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from runs.toolbox import PROMPTS, write_run

from dispark.figures.frames import COLUMNS, acceptance_frame, depth_frame, draft_length_frame, threshold_frame
from dispark.runs.loaded import load_runs

ROUNDS = sum(2 * (i + 3) for i in range(PROMPTS))  # of an arm that emits one token a round


def test_a_point_a_position(tmp_path: Path) -> None:
    write_run(tmp_path, "three", matl=3)
    write_run(tmp_path, "none")
    frame = acceptance_frame(load_runs([tmp_path]))
    assert tuple(frame.columns) == COLUMNS
    assert frame["series"].tolist() == ["three"] * 2  # nothing is drafted without a drafter
    assert frame["x"].tolist() == [1, 2]
    assert frame["value"].tolist() == [1.0, 1.0]  # these runs accept every draft
    assert (frame["low"] <= frame["value"]).all()
    assert (frame["num_rounds"] < ROUNDS).all()
    assert frame["num_prompts"].tolist() == [PROMPTS] * 2


def test_positions_count_the_rounds_that_reached_them(tmp_path: Path) -> None:
    path = write_run(tmp_path, "two", matl=2)
    frame = acceptance_frame(load_runs([path]))
    assert frame["num_rounds"].tolist() == [ROUNDS // 2]


@pytest.mark.parametrize("layers", [1, 5])
def test_depth_is_that_of_the_weights(tmp_path: Path, layers: int) -> None:
    write_run(tmp_path, "deep", drafter_weights={"num_layers": layers})
    write_run(tmp_path, "flat", drafter_weights={"num_parameters": 3})
    frame = depth_frame(load_runs([tmp_path]))
    assert frame[["series", "x"]].values.tolist() == [["deep", layers]]
    assert frame["value"].tolist() == [2.0]


def test_draft_lengths_and_seconds(tmp_path: Path) -> None:
    write_run(tmp_path, "two", matl=2)
    write_run(tmp_path, "four", matl=4)
    frame = draft_length_frame(load_runs([tmp_path]))
    assert dict(zip(frame["series"], frame["x"], strict=True)) == {"two": 1, "four": 3}
    assert "round_s" in frame


def test_thresholds_with_what_they_let_through(tmp_path: Path) -> None:
    for threshold, task in ((0.0, "chat"), (0.5, "code")):
        config = {"batch_size": 1, "max_new_tokens": 64, "scheduler": {"threshold": threshold}}
        write_run(tmp_path, "three", task=task, matl=3, config=config)
    write_run(tmp_path, "two", config={"batch_size": 1, "max_new_tokens": 64, "scheduler": {}})
    frame = threshold_frame(load_runs([tmp_path]))
    assert frame["x"].tolist() == [0.0, 0.5]
    assert frame["value"].tolist() == [2.0, 2.0]  # these runs accept every draft
    assert frame["rejected"].tolist() == [0.0, 0.0]
    assert frame["acceptance_rate"].tolist() == [1.0, 1.0]


def test_settings_of_one_drafter_are_lines_of_their_own(tmp_path: Path) -> None:
    for number in (16, 64):
        config = {"batch_size": 1, "drafter": {"num_candidates": number}}
        write_run(tmp_path / str(number), "two", config=config)
    write_run(tmp_path, "four", matl=4)
    frame = draft_length_frame(load_runs([tmp_path]))
    assert frame["series"].tolist() == ["four", "two num_candidates=16", "two num_candidates=64"]


def test_random_weights_are_marked(tmp_path: Path) -> None:
    write_run(tmp_path, "two", drafter_weights={"is_random": True, "num_layers": 1})
    assert set(depth_frame(load_runs([tmp_path]))["series"]) == {"two (random weights)"}


def test_two_runs_that_claim_one_point_are_named(tmp_path: Path) -> None:
    first, second = (write_run(tmp_path / name, "two") for name in "ab")
    with pytest.raises(ValueError, match="both hold two on chat; give one of them") as caught:
        acceptance_frame(load_runs([tmp_path]))
    assert str(first) in str(caught.value)
    assert str(second) in str(caught.value)


@pytest.mark.parametrize(("make", "changes"), [(acceptance_frame, {}), (depth_frame, {"matl": 3})])
def test_runs_without_such_points_are_refused(tmp_path: Path, make: Any, changes: dict[str, Any]) -> None:
    write_run(tmp_path, "two" if changes else "none", **changes)
    with pytest.raises(ValueError, match="none of the 1 runs holds what this figure shows"):
        make(load_runs([tmp_path]))
