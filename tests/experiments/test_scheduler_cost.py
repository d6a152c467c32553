"""The measurement in small: a line a scheduler, numbers above 0."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))

from scheduler_cost import run


def test_in_small(repo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "--rows", "4", "--positions", "3", "--rounds", "10"])
    assert run.main() == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    names = {path.stem for path in (repo / "conf" / "scheduler").glob("*.yaml")}
    assert {row["scheduler"] for row in rows} == names - {"oracle"}
    assert all(row["ms"] > 0 for row in rows)
