"""The check of Figure 6, its figure, and files that are no report."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))

from fig6_calibration import check


def cell(value: float | None, low: float | None = None, high: float | None = None) -> dict[str, Any]:
    return {"value": value, "low": low, "high": high, "reason": None}


def report(auc_after: float = 0.8) -> dict[str, Any]:
    positions = [
        {
            "confidence": "head",
            "position": k,
            "ece_before": cell(0.08),
            "ece_after": cell(0.01 * k),
            "auc_before": cell(0.8, 0.75, 0.85),
            "auc_after": cell(auc_after, 0.7, 0.9),
        }
        for k in (1, 2)
    ]
    points = [{"bin": 0, "promised": 0.2, "came": 0.3, "num": 9}, {"bin": 9, "promised": 0.9, "came": 0.8, "num": 3}]
    curves = {"head": [{"position": k, "before": points, "after": points} for k in (1, 2)]}
    return {"sampling": {"temperature": 1.0}, "positions": positions, "reliability": curves}


def test_means_and_orders() -> None:
    (row,) = check.check(report(), pd.read_csv(check.PAPER))
    assert row["mean ECE before"] == pytest.approx(0.08)
    assert row["after"] == pytest.approx(0.015)
    assert row["most after"] == 0.02
    assert row["AUC stays"]
    assert row["paper before"] == pytest.approx(0.0575)
    assert not check.check(report(auc_after=0.6), pd.read_csv(check.PAPER))[0]["AUC stays"]


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps(report()), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["check.py", str(path)])
    assert check.main() == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows"][0]["confidence"] == "head"
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    path.write_text("{}", encoding="utf-8")
    assert check.main() == 2
    assert "is no report of dispark calibrate" in capsys.readouterr().err
