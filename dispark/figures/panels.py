"""Draws tidy frames: a row of panels for each target and sampling, a panel for each task, a line for each series.

Figures are made without pyplot, so that nothing is kept between them and no display is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

MIN_ROUNDS = 20
_PANEL_INCHES = (3.2, 2.7)
_MARKERS = "osD^vP*X<>"


def acceptance_figure(frame: pd.DataFrame) -> Figure:
    """Figure 2: conditional acceptance by position; frame of `acceptance_frame`. Positions that fewer than MIN_ROUNDS
    rounds reached say little, so they stay in the data and out of the figure."""
    enough = frame[frame["num_rounds"] >= MIN_ROUNDS]
    label = f"position in the draft ({MIN_ROUNDS} rounds or more)"
    return _panels(frame if enough.empty else enough, x=label, y="conditional acceptance", limits=(0.0, 1.0))


def depth_figure(frame: pd.DataFrame) -> Figure:
    """Figure 3: MATL by layers of the drafter; frame of `depth_frame`."""
    return _panels(frame, x="layers of the drafter", y="MATL (tokens a round)")


def draft_length_figure(frame: pd.DataFrame) -> Figure:
    """Figure 4: MATL by tokens drafted, and below it the time of a round; frame of `draft_length_frame`."""
    seconds = frame.assign(value=1e3 * frame["round_s"], low=None, high=None)
    return _panels(frame, x="tokens drafted a round", y="MATL (tokens a round)", below=(seconds, "ms a round"))


def threshold_figure(frame: pd.DataFrame) -> Figure:
    """Figure 5: accepted drafts a round by threshold, and below it rejected ones; frame of `threshold_frame`."""
    rejected = frame.assign(value=frame["rejected"], low=None, high=None)
    below = (rejected, "rejected drafts a round")
    return _panels(frame, x="confidence threshold", y="accepted drafts a round", below=below, is_whole=False)


def load_figure(frame: pd.DataFrame) -> Figure:
    """Figure 8: throughput by users, and below it the verify budget; frame of `load_frame`."""
    budget = frame.assign(value=frame["verify_budget"], low=None, high=None)
    return _panels(frame, x="users", y="tokens/s", below=(budget, "drafts verified a request and round"))


def pareto_figure(frame: pd.DataFrame) -> Figure:
    """Figure 7: throughput by the speed of one user; frame of `pareto_frame`."""
    return _panels(frame, x="tokens/s of the median user", y="tokens/s in all", is_whole=False)


def reliability_figure(curves: Mapping[str, Any]) -> Figure:
    """Figure 6: what came of drafts by what was promised, before and after calibration; a row of panels for each kind
    of confidence, a panel for each position.

    Args:
        curves: `reliability` of a report of dispark calibrate.
    """
    columns = max(len(positions) for positions in curves.values())
    figure = Figure(figsize=(_PANEL_INCHES[0] * columns, _PANEL_INCHES[1] * len(curves) + 0.5), layout="constrained")
    grid = figure.subplots(len(curves), columns, squeeze=False, sharex=True, sharey=True)
    for row, (kind, positions) in zip(grid, curves.items(), strict=True):
        for axes, each in zip(row, positions, strict=False):
            axes.plot([0, 1], [0, 1], color="0.6", linewidth=1)
            for name, marker in (("before", "o"), ("after", "s")):
                points = each[name]
                x, y = ([point[key] for point in points] for key in ("promised", "came"))
                axes.plot(x, y, marker=marker, markersize=4, label=name)
            axes.set_title(f"{kind}, position {each['position']}", fontsize="small")
            axes.set_xlabel("promised survival")
            axes.set_ylabel("share that survived")
            axes.grid(alpha=0.3)
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize="small")
    return figure


def _panels(
    frame: pd.DataFrame,
    x: str,
    y: str,
    limits: tuple[float, float] | None = None,
    below: tuple[pd.DataFrame, str] | None = None,
    is_whole: bool = True,
) -> Figure:
    """The grid.

    Args:
        frame: tidy, see frames.py.
        x, y: labels of the axes.
        limits: of the y axes, or None for matplotlib's.
        below: another frame of the same panels with its label, drawn in a row under each row.
        is_whole: x counts something.
    """
    views = [(frame, y, limits)] + ([] if below is None else [(below[0], below[1], None)])
    places = sorted(set(zip(frame["target"], frame["sampling"], strict=True)))
    tasks = sorted(frame["task"].unique())
    styles = {
        name: (f"C{i % 10}", _MARKERS[i % len(_MARKERS)]) for i, name in enumerate(sorted(frame["series"].unique()))
    }
    rows, columns = len(places) * len(views), len(tasks)
    figure = Figure(figsize=(_PANEL_INCHES[0] * columns, _PANEL_INCHES[1] * rows + 0.5), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True)
    for i, (target, sampling) in enumerate(places):
        for k, (data, label, ends) in enumerate(views):
            for j, task in enumerate(tasks):
                axes = grid[i * len(views) + k][j]
                is_here = (data["target"] == target) & (data["sampling"] == sampling) & (data["task"] == task)
                _lines(axes, data[is_here], styles)
                axes.xaxis.set_major_locator(MaxNLocator(integer=is_whole, nbins="auto"))
                axes.set_xlabel(x)
                axes.set_ylabel(label)
                if k == 0:
                    axes.set_title(f"{task}\n{target}, {sampling}", fontsize="small")
                if ends is not None:
                    axes.set_ylim(*ends)
    handles = {name: line for axes in grid.flat for line, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    names = sorted(handles)
    figure.legend(
        [handles[n] for n in names], names, loc="outside lower center", ncols=min(4, len(names)), fontsize="small"
    )
    return figure


def _lines(axes: Any, data: pd.DataFrame, styles: dict[str, tuple[str, str]]) -> None:
    """A line a series, with its interval as a band where every point has one."""
    for name, points in data.groupby("series", sort=True):
        colour, marker = styles[str(name)]
        ordered = points.sort_values("x")
        x = ordered["x"].to_numpy(dtype=float)
        axes.plot(x, ordered["value"].to_numpy(dtype=float), color=colour, marker=marker, markersize=4, label=str(name))
        if ordered[["low", "high"]].notna().all(axis=None):
            low, high = (ordered[key].to_numpy(dtype=float) for key in ("low", "high"))
            axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
            if len(x) == 1:
                axes.vlines(x, low, high, color=colour)
    axes.grid(alpha=0.3)
