"""Rounds for simulations: as recorded, and with the rates that were asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dispark.serving.acceptance import AssumedAcceptance, RecordedAcceptance


def write(path: Path, rows: list[tuple[str, int, list[float], int, int]]) -> str:
    names = ["confidence", "prompt_id", "promised", "num_survived", "num_known"]
    pd.DataFrame(rows, columns=names).to_parquet(path)
    return str(path)


ROWS = [
    ("head", 0, [0.9, 0.8, 0.7], 3, 3),
    ("head", 0, [0.5, 0.4, 0.3], 1, 3),
    ("head", 1, [0.2, 0.1, 0.1], 0, 3),
    ("head", 1, [0.3, 0.1, 0.1], 1, 1),  # cut short: says nothing of the rest
    ("peak", 1, [0.6, 0.6, 0.6], 2, 3),
]


def test_a_request_replays_one_prompt_s_whole_rounds_in_order(tmp_path: Path) -> None:
    acceptance = RecordedAcceptance(write(tmp_path / "r.parquet", ROWS))
    assert acceptance.draft_length == 3
    seen = set()
    for seed in range(40):
        stream = acceptance.rounds("a", seed)
        found = tuple((tuple(promised.tolist()), accepted) for promised, accepted in (stream.next() for _ in range(3)))
        assert found[0] == found[2] or len({found[0], found[1], found[2]}) == 1  # round and round
        seen |= set(found)
    assert seen == {((0.9, 0.8, 0.7), 3), ((0.5, 0.4, 0.3), 1), ((0.2, 0.1, 0.1), 0)}
    again = [acceptance.rounds("a", 7).next()[1] for _ in range(2)]
    assert again[0] == again[1]


def test_shorter_drafts_of_the_same_rounds(tmp_path: Path) -> None:
    acceptance = RecordedAcceptance(write(tmp_path / "r.parquet", ROWS), draft_length=1)
    found = [acceptance.rounds("a", seed).next() for seed in range(30)]
    assert {len(promised) for promised, _ in found} == {1}
    assert {accepted for _, accepted in found} == {0, 1}


@pytest.mark.parametrize(
    ("rates", "spread"), [([0.8, 0.6, 0.4], 1.0), ([0.85] * 5, 1.0), ([0.5], 0.0), ([0.95, 0.9], 2.0)]
)
def test_assumed_rates_come_out_and_confidences_are_right(rates: list[float], spread: float) -> None:
    acceptance = AssumedAcceptance(rates, spread)
    promises, reached, hits = [], np.zeros(len(rates)), np.zeros(len(rates))
    places = np.arange(len(rates))
    for seed in range(1500):
        stream, num_tokens = acceptance.rounds("a", seed), 0
        while num_tokens < 30:
            promised, accepted = stream.next()
            promises.append((promised[0], accepted > 0))
            reached += accepted >= places
            hits += accepted > places
            num_tokens += 1 + accepted
    assert (hits / reached).tolist() == pytest.approx(rates, abs=0.015)
    promised_N, came_N = (np.array(column, dtype=float) for column in zip(*promises, strict=True))
    assert promised_N.mean() == pytest.approx(came_N.mean(), abs=0.02)
    if spread == 0:
        assert promised_N.std() < 1e-9
    else:
        sure = promised_N > np.median(promised_N)
        assert came_N[sure].mean() > came_N[~sure].mean() + 0.05


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: RecordedAcceptance(str(path / "none")), "holds no recorded rounds"),
        (
            lambda path: RecordedAcceptance(write(path / "r", ROWS), "entropy"),
            "has no whole rounds of confidence entropy",
        ),
        (
            lambda path: RecordedAcceptance(write(path / "r", ROWS), draft_length=4),
            "draft_length=4: must lie in 1 to 3",
        ),
        (lambda path: AssumedAcceptance([]), "must be numbers between 0 and 1"),
        (lambda path: AssumedAcceptance([1.0]), "must be numbers between 0 and 1"),
        (lambda path: AssumedAcceptance([0.5], -1), "acceptance.spread=-1: must be a number >= 0"),
    ],
)
def test_bad_settings(make: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        make(tmp_path)
