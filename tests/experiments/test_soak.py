"""The soak in small, and that its checks can fail."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))

from soak import run

SMALL = ["--target", "tiny", "--task", "smoke", "--requests", "60", "--tokens", "9", "--rows", "5", "--sample", "12"]


def test_in_small(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", *SMALL, "--rate", "1000"])
    assert run.main() == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["served"] == 60
    assert found["cancelled"] > 0
    assert found["waited"] > 0
    assert 1 < found["most_rows"] <= 5
    assert not found["failures"]


def test_every_failure_is_told() -> None:
    good = {"requests": 9, "served": 9, "rows_left": 0, "blocks_left": 0, "wrong": [], "sample": 3}
    good |= {"resident_mb_after_a_quarter": 100.0, "resident_mb_at_the_end": 120.0}
    assert run.failures(good, 50.0) == []
    for changes, words in (
        ({"served": 8}, "1 requests were lost"),
        ({"rows_left": 1}, "1 rows and 0 requests' blocks stay taken"),
        ({"wrong": ["r1"]}, "1 of 3 texts are not the request's own"),
        ({"resident_mb_at_the_end": 200.0}, "memory grew by 100 MB"),
    ):
        assert run.failures(good | changes, 50.0) == [words]
