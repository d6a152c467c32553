"""`dispark figures`: finished runs -> the data of a figure as CSV, and the figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from dispark.figures import frames, panels, serving_frames
from dispark.runs.files import check_writable, write_atomic, write_text
from dispark.runs.loaded import load_runs
from dispark.runs.table import to_text

_SHORT = ("x", "value", "low", "high", "round_s", "rejected", "acceptance_rate", "verify_budget", "mean_draft_length")
FORMATS = ("png", "svg", "pdf")


class PaperFigure(NamedTuple):
    """What a figure is made of."""

    load: Callable[[Sequence[str]], Any]
    frame: Callable[[Any], pd.DataFrame]
    draw: Callable[[pd.DataFrame], Figure]


FIGURES = {
    "acceptance": PaperFigure(load_runs, frames.acceptance_frame, panels.acceptance_figure),
    "depth": PaperFigure(load_runs, frames.depth_frame, panels.depth_figure),
    "draft_length": PaperFigure(load_runs, frames.draft_length_frame, panels.draft_length_figure),
    "threshold": PaperFigure(load_runs, frames.threshold_frame, panels.threshold_figure),
    "load": PaperFigure(serving_frames.load_serving, serving_frames.load_frame, panels.load_figure),
    "pareto": PaperFigure(serving_frames.load_serving, serving_frames.pareto_frame, panels.pareto_figure),
}


def run_figures(paths: Sequence[str], figure: str, out: str, formats: Sequence[str]) -> dict[str, Any]:
    """Prints the data, writes it and the figure, and returns where they are.

    Args:
        paths: folders of runs.
        figure: one of FIGURES.
        out: folder for the files, made where absent.
        formats: of FORMATS, at least one.

    Raises:
        ValueError: an unknown figure or format, no fitting run, or a folder that can't be written.
    """
    if figure not in FIGURES:
        raise ValueError(f"figure={figure}: must be one of {', '.join(FIGURES)}")
    if not formats:
        raise ValueError(f"formats=[]: must name at least one of {', '.join(FORMATS)}")
    for name in formats:
        if name not in FORMATS:
            raise ValueError(f"formats=[{name}]: must be of {', '.join(FORMATS)}")
    folder = Path(out)
    check_writable(folder, "out")
    chosen = FIGURES[figure]
    frame = chosen.frame(chosen.load(paths))
    print(to_text(frame.drop(columns="run"), {key: ".3f" for key in _SHORT if key in frame}))
    data = folder / f"{figure}.csv"
    write_text(data, frame.to_csv(index=False))
    drawn, files = chosen.draw(frame), []
    for name in formats:
        files.append(folder / f"{figure}.{name}")
        write_atomic(files[-1], lambda place, name=name: drawn.savefig(place, format=name, dpi=150))  # type: ignore[misc]
    return {"figure": figure, "data": str(data), "files": [str(file) for file in files], "num_points": len(frame)}
