"""What a shipped drafter's card says of decoding."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from runs.toolbox import write_run

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))

from trained_drafters.ship import results_section

from dispark.runs.compare import compare, load_runs


def test_a_row_for_each_task_and_their_mean(tmp_path: Path) -> None:
    for task in ("chat", "code"):
        write_run(tmp_path, "three", task=task, matl=3)
    frame = compare(load_runs([tmp_path]))
    text = results_section(frame, "three")
    rows = [line for line in text.splitlines() if line.startswith("| greedy")]
    assert [row.split("|")[2].strip() for row in rows] == ["chat", "code", "macro of 2 tasks"]
    assert all("| 3.000 | [3.00, 3.00] |" in row for row in rows)
    with pytest.raises(ValueError, match="none of drafter eagle3"):
        results_section(frame, "eagle3")
