"""The rule, step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dispark.schedulers.heuristic import HeuristicScheduler
from dispark.types import Draft, FinishReason, Load, Outcome

LOAD = Load(1, 0, 0, [9], draft_length=7)


def round_of(
    scheduler: HeuristicScheduler,
    drafted: list[int],
    accepted: list[int],
    finish: list[FinishReason | None] | None = None,
) -> None:
    assert scheduler.draft_limit(LOAD) is not None
    width = max(drafted, default=0)
    draft = Draft(torch.zeros(len(drafted), width, dtype=torch.int64), drafted)
    assert scheduler.choose(draft, LOAD) == drafted
    num = len(drafted)
    scheduler.observe(Outcome([[]] * num, accepted, finish or [None] * num, [False] * num), drafted, 0.1)


def test_two_more_or_one_less() -> None:
    scheduler = HeuristicScheduler(start=2)
    for accepted, expected in (
        (2, 4),
        (4, 6),
        (6, 7),
        (7, 7),
        (2, 6),
        (0, 5),
        (0, 4),
        (0, 3),
        (0, 2),
        (0, 1),
        (0, 1),
        (1, 3),
    ):
        limit = scheduler.draft_limit(LOAD)
        assert limit is not None
        round_of(scheduler, [limit], [accepted])
        assert scheduler.draft_limit(LOAD) == expected


def test_the_drafter_s_reach_ends_the_growth() -> None:
    scheduler = HeuristicScheduler(start=9)
    assert scheduler.draft_limit(LOAD) == 7
    for _ in range(4):
        round_of(scheduler, [7], [7])
        assert scheduler.draft_limit(LOAD) == 7
    round_of(scheduler, [7], [1])
    assert scheduler.draft_limit(LOAD) == 6


def test_success_is_all_that_was_asked_for() -> None:
    """A drafter that found less, as a lookup may, did not succeed."""
    scheduler = HeuristicScheduler(start=5)
    round_of(scheduler, [1], [1])
    assert scheduler.draft_limit(LOAD) == 4


def test_texts_that_end_say_nothing() -> None:
    scheduler = HeuristicScheduler(start=3)
    round_of(scheduler, [3, 3], [3, 1], [None, "stop"])
    assert scheduler.draft_limit(LOAD) == 5
    round_of(scheduler, [5], [1], ["stop"])
    assert scheduler.draft_limit(LOAD) == 5


def test_rounds_without_drafts_teach_nothing() -> None:
    scheduler = HeuristicScheduler(start=3)
    round_of(scheduler, [0, 0], [0, 0])
    assert scheduler.draft_limit(LOAD) == 3


def test_of_several_rows_all_have_to_succeed() -> None:
    scheduler = HeuristicScheduler(start=3)
    round_of(scheduler, [3, 3], [3, 2])
    assert scheduler.draft_limit(LOAD) == 2
    round_of(scheduler, [2, 2], [2, 2])
    assert scheduler.draft_limit(LOAD) == 4
    target: Any = None
    scheduler.bind(target)
    assert scheduler.draft_limit(LOAD) == 3


@pytest.mark.parametrize("start", [0, -1, 1.5])
def test_bad_starts(start: Any) -> None:
    with pytest.raises(ValueError, match=r"scheduler\.start=.*: must be a whole number >= 1"):
        HeuristicScheduler(start)
