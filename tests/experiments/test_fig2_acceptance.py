"""What the check of Figure 2 makes of lines that fall, rise, or say nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pandas as pd
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))

from fig2_acceptance import check


def line(series: str, values: list[float], width: float = 0.02, rounds: int = 100) -> list[dict[str, object]]:
    place = {"target": "toy", "sampling": "t1", "task": "math", "series": series, "num_rounds": rounds}
    return [
        place | {"x": k, "value": value, "low": value - width, "high": value + width}
        for k, value in enumerate(values, start=1)
    ]


def rows(*lines: list[dict[str, object]]) -> dict[str, dict[str, object]]:
    frame = pd.DataFrame([point for each in lines for point in each])
    return {row["drafter"]: row for row in check.check(frame, pd.read_csv(check.PAPER))}


def test_trends_go_by_intervals() -> None:
    found = rows(
        line("dflash", [0.8, 0.7, 0.6]),
        line("dispark", [0.8, 0.81, 0.79]),
        line("eagle3", [0.5, 0.6, 0.7]),
        line("wide", [0.8, 0.7, 0.6], width=0.2),
    )
    assert {name: row["trend"] for name, row in found.items()} == {
        "dflash": "falls",
        "dispark": "open",
        "eagle3": "rises",
        "wide": "open",
    }
    assert found["dispark"]["above/below/open against dflash"] == "2/0/1"
    assert found["eagle3"]["above/below/open against dflash"] == "1/2/0"
    assert found["dflash"]["above/below/open against dflash"] is None
    assert found["dispark"]["paper"] == "0.93 at 1"


def test_positions_that_few_rounds_reached_do_not_count() -> None:
    few = line("dispark", [0.9])[0] | {"x": 4, "num_rounds": 3}
    assert rows([*line("dispark", [0.8, 0.8, 0.8]), few])["dispark"]["positions"] == 3


def test_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "acceptance.csv"
    pd.DataFrame(line("dispark", [0.8, 0.7])).to_csv(file, index=False)
    monkeypatch.setattr(sys, "argv", ["check.py", str(file)])
    assert check.main() == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows"][0]["trend"] == "falls"
    file.write_text("a,b\n1,2\n")
    assert check.main() == 2
    assert "lacks the columns" in capsys.readouterr().err
    file.unlink()
    assert check.main() == 2
    assert capsys.readouterr().err == f"check: error: {file}: No such file or directory\n"
