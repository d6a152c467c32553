"""What is drawn: panels, lines and bands."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from dispark.figures.panels import MIN_ROUNDS, acceptance_figure, depth_figure, draft_length_figure


def points(**changes: Any) -> list[dict[str, Any]]:
    base = {"target": "toy", "sampling": "greedy", "task": "chat", "series": "a", "low": None, "high": None}
    base |= {"num_rounds": MIN_ROUNDS, "num_prompts": 9, "run": "r", "round_s": 0.02}
    return [base | {"x": x, "value": x / 10} | changes for x in (1, 2, 3)]


def lines(axes: Any) -> dict[str, list[float]]:
    return {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}


def test_a_panel_for_each_task_and_a_row_for_each_sampling() -> None:
    rows = points() + points(task="math") + points(sampling="t1", series="b")
    figure = depth_figure(pd.DataFrame(rows))
    assert len(figure.axes) == 4
    assert [axes.get_title().split("\n")[0] for axes in figure.axes] == ["chat", "math"] * 2
    assert lines(figure.axes[0]) == {"a": [0.1, 0.2, 0.3]}
    assert lines(figure.axes[2]) == {"b": [0.1, 0.2, 0.3]}
    assert lines(figure.axes[3]) == {}
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]


def test_an_interval_is_a_band_only_where_every_point_has_one() -> None:
    frame = pd.DataFrame(points(low=0.0, high=1.0) + points(series="b"))
    axes = depth_figure(frame).axes[0]
    assert len(axes.collections) == 1


def test_positions_that_few_rounds_reached_are_left_out() -> None:
    rows = points()
    rows[2]["num_rounds"] = MIN_ROUNDS - 1
    assert lines(acceptance_figure(pd.DataFrame(rows)).axes[0]) == {"a": [0.1, 0.2]}


def test_too_few_rounds_everywhere_still_make_a_figure() -> None:
    assert lines(acceptance_figure(pd.DataFrame(points(num_rounds=1))).axes[0]) == {"a": [0.1, 0.2, 0.3]}


def test_the_time_of_a_round_lies_below_matl() -> None:
    figure = draft_length_figure(pd.DataFrame(points()))
    above, below = figure.axes
    assert lines(above)["a"] == [0.1, 0.2, 0.3]
    assert lines(below)["a"] == pytest.approx([20.0] * 3)
    assert below.get_ylabel() == "ms a round"
