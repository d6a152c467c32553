"""The counterexample, as its command prints it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))

from appendix_a import check


def test_both_laws_are_the_paper_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main() == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["agrees"]
    assert [round(row["A"], 12) for row in result["rows"]] == [0.7, 0.85]
