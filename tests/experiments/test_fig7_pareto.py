"""The check of Figure 7: speeds at the same throughput."""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))

from experiments.lines import frame, line
from fig7_pareto import check


def curves(target: str = "v4_flash_like on h200_8") -> pd.DataFrame:
    # x is the speed of a user, the value the throughput: each user slower, all together faster.
    mtp = line("mtp_1", {100.0: 100.0, 50.0: 200.0, 20.0: 400.0})
    fast = line("dispark", {150.0: 150.0, 80.0: 200.0, 40.0: 400.0, 20.0: 500.0})
    return frame(mtp, fast).assign(target=target)


def test_gains_at_matched_throughput() -> None:
    (row,) = check.check(curves(), pd.read_csv(check.PAPER))
    assert row["arm"] == "dispark"
    assert row["matched points"] == 2  # 100 tokens/s is less than it ever makes
    assert row["least gain"] == pytest.approx(80 / 50 - 1)
    assert row["most gain"] == pytest.approx(40 / 20 - 1)
    assert row["most throughput"] == pytest.approx(0.25)
    assert row["paper"] == "60% to 85%"
    assert check.check(curves("smollm2_135m"), pd.read_csv(check.PAPER))[0]["paper"] is None


def test_without_the_baseline() -> None:
    with pytest.raises(ValueError, match="no panel has mtp_1 beside another arm"):
        check.check(frame(line("dispark", {1.0: 1.0})), pd.read_csv(check.PAPER))
