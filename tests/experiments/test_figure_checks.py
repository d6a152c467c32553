"""What all checks of figures share, on each of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))

from experiments.lines import frame, line
from fig2_acceptance import check as fig2
from fig3_depth import check as fig3
from fig4_length import check as fig4
from figure_checks import drafter_of, verdict


@pytest.mark.parametrize(
    ("ends", "other", "found"),
    [
        ((0.5, 0.6), (0.3, 0.4), "above"),
        ((0.3, 0.4), (0.5, 0.6), "below"),
        ((0.3, 0.5), (0.4, 0.6), "open"),
        ((0.3, 0.4), (0.4, 0.5), "open"),
        ((None, None), (0.4, 0.5), "open"),
        ((0.6, 0.7), (0.4, float("nan")), "open"),
    ],
)
def test_verdicts_go_by_intervals(ends: tuple[Any, Any], other: tuple[Any, Any], found: str) -> None:
    point, against = ({"low": low, "high": high} for low, high in (ends, other))
    assert verdict(point, against) == found


def test_settings_may_follow_a_drafters_name() -> None:
    assert [drafter_of(name) for name in ("dispark", "dispark draft_length=4", "dflash (random weights)")] == [
        "dispark",
        "dispark",
        "dflash",
    ]


@pytest.mark.parametrize("script", [fig2, fig3, fig4], ids=lambda script: script.__name__)
def test_the_scripts(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "figure.csv"
    frame(line("dispark", {2: 0.8, 4: 0.7}, round_s=0.1), line("dflash", {2: 0.7, 4: 0.6}, round_s=0.1)).to_csv(file)
    monkeypatch.setattr(sys, "argv", ["check.py", str(file)])
    assert script.main() == 0
    out = capsys.readouterr().out
    assert "nan" not in out
    rows = json.loads(out.splitlines()[-1])["rows"]
    assert {"dispark"} <= {row["drafter"] for row in rows}
    file.write_text("a,b\n1,2\n")
    assert script.main() == 2
    assert "lacks the columns" in capsys.readouterr().err
    file.unlink()
    assert script.main() == 2
    assert capsys.readouterr().err == f"check: error: {file}: No such file or directory\n"
