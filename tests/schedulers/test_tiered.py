"""The walk through the tiers, and tiers that make no sense."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dispark.interfaces import Scheduler
from dispark.schedulers.tiered import TieredScheduler
from dispark.types import Draft, Load

TIERS = [
    {"confidence": 0.9, "tokens": None},
    {"confidence": 0.6, "tokens": 2},
    {"confidence": 0.3, "tokens": 1},
    {"confidence": 0, "tokens": 0},
]


def choose(confidence: list[float] | None, length: int = 5) -> int:
    values = None if confidence is None else torch.tensor([confidence])
    draft = Draft(torch.zeros(1, 5, dtype=torch.int64), [length], None, values)
    return TieredScheduler(TIERS).choose(draft, Load(1, 0, 0, [9]))[0]


@pytest.mark.parametrize(
    ("confidence", "length", "wanted"),
    [
        ([0.95, 0.0, 0.0, 0.0, 0.0], 5, 5),  # sure of the first: the whole block
        ([0.7, 0.0, 0.2, 0.9, 0.9], 5, 2),  # two at once, then a look at the third
        ([0.7, 0.0, 0.4, 0.7, 0.0], 5, 5),
        ([0.4, 0.4, 0.1, 0.9, 0.9], 5, 2),  # token by token
        ([0.1, 0.9, 0.9, 0.9, 0.9], 5, 0),
        ([0.7, 0.7, 0.7, 0.7, 0.7], 3, 3),  # the draft ends first
        ([0.95, 0.5, 0.5, 0.5, 0.5], 2, 2),
    ],
)
def test_the_walk(confidence: list[float], length: int, wanted: int) -> None:
    assert choose(confidence, length) == wanted


def test_it_needs_a_confidence_where_there_is_a_draft() -> None:
    assert choose(None, 0) == 0
    with pytest.raises(ValueError, match=r"scheduler=tiered: the drafter gives no confidence; allowed"):
        choose(None)
    assert isinstance(TieredScheduler(TIERS), Scheduler)


@pytest.mark.parametrize(
    ("tiers", "words"),
    [
        ([], "at least one tier"),
        (TIERS[:3], "end at 0"),
        ([TIERS[1], TIERS[0], TIERS[3]], "must fall"),
        ([TIERS[3], TIERS[3]], "must fall"),
        ([{"confidence": 0.0}], "must have confidence and tokens"),
        ([{"confidence": 2, "tokens": 1}], r"tiers\[0\].confidence=2: must be a number from 0 to 1"),
        ([{"confidence": 0, "tokens": -1}], r"tiers\[0\].tokens=-1: must be a whole number >= 0"),
        ([{"confidence": 0, "tokens": True}], r"tiers\[0\].tokens=True: must be a whole number >= 0"),
    ],
)
def test_bad_tiers(tiers: list[Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TieredScheduler(tiers)
