"""`dispark figures`: files, JSON, and one line for each mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from figures.test_serving_frames import write_serving
from runs.toolbox import write_run

from dispark.cli import main
from dispark.figures.command import FIGURES

pytestmark = pytest.mark.usefixtures("clean_logging")  # Hydra gives the root logger a handler of this test's stderr


@pytest.mark.parametrize("name", list(FIGURES))
def test_every_figure_is_written_with_its_data(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"batch_size": 1, "max_new_tokens": 64, "scheduler": {"threshold": 0.4}}
    write_run(tmp_path / "runs", "two", drafter_weights={"num_layers": 2}, config=config)
    write_serving(tmp_path / "runs", users=4)
    out = tmp_path / "figures"
    words = [str(tmp_path / "runs"), f"figure={name}", f"out={out}", "formats=[png,svg]"]
    assert main(["figures", *words]) == 0
    printed = capsys.readouterr().out.strip().splitlines()
    result = json.loads(printed[-1])
    assert result["files"] == [str(out / f"{name}.png"), str(out / f"{name}.svg")]
    assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (out / f"{name}.svg").read_text(encoding="utf-8")
    assert len(pd.read_csv(result["data"])) == result["num_points"] > 0


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("figure=pie", "figure=pie: must be one of acceptance, depth, draft_length, threshold, load, pareto"),
        ("formats=[gif]", "formats=[gif]: must be of png, svg, pdf"),
        ("formats=[]", "formats=[]: must name at least one of png, svg, pdf"),
        ("out=/dev/null/x", "out=/dev/null/x: "),
        ("runs=[/no/such]", "/no/such"),
    ],
)
def test_mistakes(word: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "runs", "two")
    words = [f"runs=[{tmp_path / 'runs'}]", f"out={tmp_path / 'out'}"]
    assert main(["figures", *words, word]) == 2
    assert message in capsys.readouterr().err
