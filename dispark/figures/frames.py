"""The data behind each figure: one row a point, computed from the raw records of finished runs.

Columns of every frame: target, sampling and task (a panel), series (a line), `x`, value, low and high (the 95 %
interval over prompts, None where there is none), num_rounds and num_prompts behind the point, and run (its folder).

It knows nothing about drawing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from dispark.measure.acceptance import position_counts
from dispark.measure.throughput import BASELINE_ARM, of_arm
from dispark.runs.loaded import LoadedRun
from dispark.runs.settings import differing_settings

_PLACE = ["target", "sampling", "task", "series", "x"]
COLUMNS = (*_PLACE, "value", "low", "high", "num_rounds", "num_prompts", "run")


class Point(NamedTuple):
    """A point of a line, and how many rounds are behind it."""

    x: float
    value: float
    interval: Sequence[float | None] | None
    num_rounds: int


Points = Callable[[LoadedRun, Mapping[str, Any]], Iterator[Point]]


def acceptance_frame(runs: Sequence[LoadedRun]) -> pd.DataFrame:
    """Conditional acceptance (value) by position in the draft (x), see METRICS.md.

    Raises:
        ValueError: no run drafts anything, or two runs claim one point.
    """

    def points(run: LoadedRun, summary: Mapping[str, Any]) -> Iterator[Point]:
        rates = summary["conditional_acceptance_at"]
        intervals = summary.get("conditional_acceptance_at_ci") or [None] * len(rates)
        reached = position_counts(of_arm(run.rounds, run.arm), len(rates)).reached_RG.sum(axis=0)
        for k, (rate, interval) in enumerate(zip(rates, intervals, strict=True)):
            if rate is not None:
                yield Point(k + 1, rate, interval, int(reached[k]))

    return _frame(runs, points)


def depth_frame(runs: Sequence[LoadedRun]) -> pd.DataFrame:
    """MATL (value) by layers of the drafter (x); drafters that have none are left out.

    Raises:
        ValueError: no run has a drafter with layers, or two runs claim one point.
    """

    def points(run: LoadedRun, summary: Mapping[str, Any]) -> Iterator[Point]:
        layers = (run.run.get("drafter_weights") or {}).get("num_layers")
        if layers is not None and summary["matl"] is not None:
            yield Point(layers, summary["matl"], summary["matl_ci"], summary["num_rounds"])

    return _frame(runs, points)


def draft_length_frame(runs: Sequence[LoadedRun]) -> pd.DataFrame:
    """MATL (value) by tokens drafted a round (x), with a further column round_s, the mean seconds of a round.

    Raises:
        ValueError: no run drafts anything, or two runs claim one point.
    """

    def points(run: LoadedRun, summary: Mapping[str, Any]) -> Iterator[Point]:
        if summary["matl"] is not None:
            yield Point(run.draft_length(run.arm), summary["matl"], summary["matl_ci"], summary["num_rounds"])

    frame = _frame(runs, points)
    by_path = {str(run.path): run for run in runs}
    return frame.assign(round_s=[by_path[path].summary()["round_s_mean"] for path in frame["run"]])


def threshold_frame(runs: Sequence[LoadedRun]) -> pd.DataFrame:
    """Accepted drafts a round (value) by the threshold of scheduler=threshold (x), with further columns: rejected, the
    verified drafts a round that were not, and acceptance_rate, the accepted share of the verified.

    Raises:
        ValueError: no run with that scheduler drafts anything, or two runs claim one point.
    """
    with_threshold = [run for run in runs if run.run["config"]["scheduler"].get("threshold") is not None]

    def points(run: LoadedRun, summary: Mapping[str, Any]) -> Iterator[Point]:
        threshold = float(run.run["config"]["scheduler"]["threshold"])
        yield Point(threshold, summary["mean_accepted"], summary.get("mean_accepted_ci"), summary["num_rounds"])

    frame = _frame(with_threshold, points, len(runs))
    by_path = {str(run.path): run.summary() for run in with_threshold}
    wasted = frame["run"].map(lambda path: by_path[path]["wasted_verify_share"])
    verified = frame["run"].map(lambda path: by_path[path]["mean_verify_length"])
    return frame.assign(rejected=verified - frame["value"], acceptance_rate=1 - wasted.astype(float))


def _frame(runs: Sequence[LoadedRun], points: Points, num_given: int | None = None) -> pd.DataFrame:
    """Points of every run that drafts.

    Raises:
        ValueError: there are none, or two runs claim one.
    """
    drafting = [run for run in runs if run.arm != BASELINE_ARM and run.draft_length(run.arm) > 0]
    rows = []
    for run, settings in zip(drafting, differing_settings(drafting), strict=True):
        place = {"target": run.label("target"), "sampling": run.label("sampling"), "task": run.label("task")}
        name = run.label("drafter") + (" (random weights)" if run.has_random_weights else "")
        summary = run.summary()
        for point in points(run, summary):
            low, high = point.interval or (None, None)
            figures = {"x": point.x, "value": point.value, "low": low, "high": high, "num_rounds": point.num_rounds}
            source = {"num_prompts": summary["num_prompts"], "run": str(run.path)}
            rows.append(place | {"series": name, "settings": settings} | figures | source)
    if not rows:
        raise ValueError(f"runs: none of the {num_given or len(runs)} runs holds what this figure shows")
    frame = pd.DataFrame(rows)
    if frame.duplicated(_PLACE).any():  # several settings of one drafter: each is a line of its own
        has_words = frame["settings"] != ""
        frame.loc[has_words, "series"] += " " + frame.loc[has_words, "settings"]
    if frame.duplicated(_PLACE).any():
        both = frame[frame.duplicated(_PLACE, keep=False)]
        first = both.iloc[0]
        twins = both[(both[_PLACE] == first[_PLACE]).all(axis=1)]["run"].unique()
        raise ValueError(
            f"runs: {' and '.join(twins)} both hold {first['series']} on {first['task']}; give one of them"
        )
    return frame.sort_values(_PLACE, ignore_index=True)[list(COLUMNS)]
